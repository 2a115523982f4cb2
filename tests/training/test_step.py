"""A training step reduces gradients once, computes the correct gradient, and seeds dropout by position."""

import copy
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.conftest import MakeRun
from tests.training.conftest import state_of
from tests.training.parallel.conftest import as_rank, counting, default_ranks
from tokens.batches.micro_batches import MicroBatch
from training.parallel.process_group import RankGroup, Ranks
from training.step import run_microbatches, seed_dropout, train_step


@pytest.mark.parametrize("determinism", ["off", "elastic"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_gradients_are_reduced_once_per_step(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, accumulation: int, parallel: str, determinism: str
) -> None:
    plain = dist.all_reduce

    def all_reduce(buffer: torch.Tensor, **options: Any) -> Any:
        plain(buffer, group=options["group"])
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()  # a fake group's future has no value
        done.set_result([buffer])
        return SimpleNamespace(wait=lambda: None, get_future=lambda: done)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    run = make_run(global_batch_size=4 * accumulation, parallel=parallel, determinism=determinism)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with as_rank(0, of=2):
        ranks = attrs.evolve(default_ranks(), node=RankGroup(rank=0, size=2))
        state, settings = state_of(run, ranks)
        train_step(state, settings, 0, lambda: MicroBatch(tokens, tokens))
        with counting() as collectives:
            train_step(state, settings, 1, lambda: MicroBatch(tokens, tokens))
    # DDP has one bucket. FSDP has a group for each block, and one for the embeddings and the last norm.
    groups = 1 if parallel == "ddp" else len(state.parallel.network.blocks) + 1
    default_reduction = {"ddp": "allreduce_", "fsdp": "_reduce_scatter_base_"}[parallel]
    reduction = {"off": default_reduction, "elastic": "alltoall_base_"}[determinism]
    # This collective adds the squares of all shards.
    norm = {"allreduce_": 1} if (parallel, determinism) == ("fsdp", "off") else {}
    reductions = {"allreduce_", "_reduce_scatter_base_", "alltoall_base_"}
    counts = {name: count for name, count in collectives.items() if name in reductions}
    assert counts == norm | {reduction: groups}


def test_weighted_step_has_the_weighted_mean_loss(make_run: MakeRun, alone: Ranks) -> None:
    state, settings = state_of(make_run(), alone)
    network, generator = copy.deepcopy(state.parallel.network), torch.Generator().manual_seed(0)
    rows = torch.randint(257, (4, 2, 33), generator=generator)
    weights = torch.rand(4, 2, 32, generator=generator)
    weights[1] = 0.0  # a micro-batch without any target that adds to the loss
    batches = [
        MicroBatch(tokens[:, :-1], tokens[:, 1:], token_weights, weights.mean().item())
        for tokens, token_weights in zip(rows, weights, strict=True)
    ]
    losses = run_microbatches(state, settings, 0, iter(batches).__next__)
    logits = network(rows[..., :-1].flatten(0, 1)).flatten(0, 1)
    token_losses = F.cross_entropy(logits, rows[..., 1:].flatten(), reduction="none")
    expected_loss = (token_losses * weights.flatten()).sum() / weights.sum()
    expected_loss.backward()
    assert torch.allclose(losses.mean(), expected_loss)
    for gradient, parameter in zip(state.parallel.gradients(), network.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(gradient / len(batches), parameter.grad, rtol=1e-4, atol=1e-7)


def test_dropout_depends_on_seed_step_and_index() -> None:
    def mask(*position: int) -> torch.Tensor:
        torch.rand(torch.randint(1, 50, ()).item())  # the history of the generator must not matter
        seed_dropout(*position)
        return torch.dropout(torch.ones(1000), 0.5, train=True)

    assert torch.equal(mask(42, 3, 1), mask(42, 3, 1))
    masks_elsewhere = [mask(42, 3, 0), mask(42, 2, 1), mask(43, 3, 1), mask(42, 1, 3)]
    assert not any(torch.equal(mask(42, 3, 1), elsewhere) for elsewhere in masks_elsewhere)
