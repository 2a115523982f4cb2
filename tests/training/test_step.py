"""One step: one reduction whatever the accumulation, the right gradient, dropout by position."""

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from model.config import ModelConfig
from model.gpt import GPT, initialize
from model.loss import NextTokenLoss
from tests.conftest import TINY_MODEL, train
from tokens.batches.micro_batches import MicroBatch
from tokens.batches.sampling import Layout
from training.parallel.process_group import Ranks
from training.parallel.wrap import parallelize
from training.precision import LossScale, Numerics
from training.step import run_microbatches, seed_dropout

# Runs under torchrun on two ranks. Counts what the process group is asked for in the third step of a run.
COUNT_COLLECTIVES = """
import collections

from torch.profiler import ProfilerActivity, profile

import train
from training import loop, step

plain = step.train_step


def counted(state, settings, number, next_batch):
    if number != 2:
        return plain(state, settings, number, next_batch)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = plain(state, settings, number, next_batch)
    counts = collections.Counter(event.name for event in profiler.events() if event.name.startswith("c10d::"))
    if state.parallel.data_parallel.rank == 0:
        print("COUNTS", dict(counts), len(state.parallel.network.blocks), sep="; ")
    return result


loop.train_step = counted
train.leave(train.main())
"""


def count_collectives(run: Path, script: Path, *overrides: str) -> tuple[dict[str, int], int]:
    script.write_text(COUNT_COLLECTIVES)
    options = [word for override in overrides for word in ("--set", override)]
    done = train(run, *options, "--max-steps", "3", ranks=2, script=script)
    assert done.returncode == 0, done.stderr
    _, counts, blocks = next(line for line in done.stdout.splitlines() if line.startswith("COUNTS")).split("; ")
    return ast.literal_eval(counts), int(blocks)


@pytest.mark.parametrize("determinism", ["off", "elastic"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_gradients_are_reduced_once_a_step_whatever_the_accumulation(
    make_run: Callable[..., Path], tmp_path: Path, accumulation: int, parallel: str, determinism: str
) -> None:
    run = make_run(global_batch_size=4 * accumulation, validation_interval=None)
    options = (f"parallel={parallel}", f"determinism={determinism}")
    counts, blocks = count_collectives(run, tmp_path / "count.py", *options)
    groups = 1 if parallel == "ddp" else blocks + 1  # one bucket; or each block, and embeddings with the last norm
    own = {"ddp": "c10d::allreduce_", "fsdp": "c10d::_reduce_scatter_base_"}[parallel]
    reduction = {"off": own, "elastic": "c10d::alltoall_base_"}[determinism]
    assert counts[reduction] == groups
    norm = {"c10d::allreduce_": 1} if (parallel, determinism) == ("fsdp", "off") else {}  # of the shards' squares
    others = {"c10d::allreduce_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_"} - {reduction}
    assert {name: count for name, count in counts.items() if name in others} == norm


def test_with_weights_a_step_has_the_weighted_mean_loss_of_its_global_batch(alone: Ranks) -> None:
    generator = torch.Generator().manual_seed(0)
    config = ModelConfig(**TINY_MODEL)
    rows = torch.randint(config.vocab_size, (4, 2, config.context_length + 1), generator=generator)
    weights = torch.rand(rows[..., 1:].shape, generator=generator)
    weights[1] = 0.0  # a micro-batch of which nothing counts
    networks = [GPT(config), GPT(config)]
    for network in networks:
        initialize(network, 0)
    numerics = Numerics(determinism="elastic", precision="fp32", compiled=False)
    parallel = parallelize(NextTokenLoss(networks[0]), "ddp", numerics, 4, alone)
    layout = Layout(context_length=config.context_length, microbatch_size=2, microbatches=4, data_parallel_size=1)
    state: Any = SimpleNamespace(parallel=parallel, loss_scale=LossScale("fp32", alone.device))
    settings: Any = SimpleNamespace(layout=layout, numerics=numerics, seed=0)
    batches = [
        MicroBatch(part[:, :-1], part[:, 1:], own, weights.mean().item())
        for part, own in zip(rows, weights, strict=True)
    ]
    losses = run_microbatches(state, settings, 0, iter(batches).__next__)
    whole = F.cross_entropy(
        networks[1](rows[..., :-1].flatten(0, 1)).flatten(0, 1), rows[..., 1:].flatten(), reduction="none"
    )
    wanted = (whole * weights.flatten()).sum() / weights.sum()
    wanted.backward()
    assert torch.allclose(losses.mean(), wanted)
    for found, parameter in zip(parallel.gradients(), networks[1].parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(found / parallel.gradient_divisor, parameter.grad, rtol=1e-4, atol=1e-7)


def test_dropout_is_a_function_of_seed_step_and_place() -> None:
    def mask(*position: int) -> torch.Tensor:
        torch.rand(torch.randint(1, 50, ()).item())  # history of the generator does not matter
        seed_dropout(*position)
        return torch.dropout(torch.ones(1000), 0.5, train=True)

    assert torch.equal(mask(42, 3, 1), mask(42, 3, 1))
    others = [mask(42, 3, 0), mask(42, 2, 1), mask(43, 3, 1), mask(42, 1, 3)]
    assert not any(torch.equal(mask(42, 3, 1), other) for other in others)
