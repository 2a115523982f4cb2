"""The same bits on any world size: sums in one tree, and hashes of real runs.

Hashes are compared within one run of this suite, never with recorded ones: another torch or CPU has other bits.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.conftest import metrics, train
from tests.model.architectures import NANOCHAT, QWEN3
from tests.walks import final_hash
from training.parallel import ordered_reduce
from training.parallel.mesh import ALONE, Levels, RankGroup
from training.parallel.ordered_reduce import (
    LeafSum,
    OrderedGradients,
    ordered_all_reduce,
    pairwise_sum,
)
from training.parallel.sum_tree import elastic_world_sizes, odd_factor
from training.telemetry.metrics_log import read_metrics

# More than DDP's first bucket of 1 MiB; rows and columns that 4 ranks do not divide; an untied head.
EVERYTHING = {"drop_rate": 0.1, "tie_weights": False, "emb_dim": 134, "context_length": 30}
FOUR_STEPS = {"min_train_tokens": 4 * 8 * 30, "checkpoint_interval": 2}
HEADS = {"emb_dim": 136, "n_heads": 4, "n_kv_heads": 2}
MODERN = [NANOCHAT | HEADS | {"logit_softcap": 15.0}, QWEN3 | HEADS | {"mlp_width": 100}]
LAYOUTS = [(1, "fsdp"), (2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp")]  # one rank is bare under either


def leaves(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-6, 6, count)[torch.randperm(count, generator=generator)]
    return torch.randn(count, 33, generator=generator) * scale[:, None]


def sum_on(world_size: int, parts: torch.Tensor) -> torch.Tensor:
    """Return the sum as so many ranks compute it, each adding its contiguous run of leaves first."""
    run = odd_factor(len(parts))
    of_ranks = []
    for own in parts.chunk(world_size):
        total = LeafSum(run)
        *first, last = [[half.clone() for half in leaf.split(20)] for leaf in own]
        for leaf in first:
            total.add(leaf)
        for earlier in total.take():
            torch._foreach_add_(last, earlier)
        of_ranks.append(torch.cat(last))
    return pairwise_sum(torch.stack(of_ranks))


def tree_sum(parts: list[torch.Tensor], run: int) -> torch.Tensor:
    """Return the sum as documented: runs of leaves in order, then neighbors, level by level."""
    level = [functools.reduce(torch.add, parts[begin : begin + run]) for begin in range(0, len(parts), run)]
    while len(level) > 1:
        pairs = [torch.add(*level[index : index + 2]) for index in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


@given(st.integers(1, 48), st.integers(0, 1000))
def test_the_sum_has_the_same_bits_on_every_legal_world_size(count: int, seed: int) -> None:
    parts = leaves(count, seed)
    reference = sum_on(1, parts)
    for world_size in elastic_world_sizes(count):
        assert torch.equal(sum_on(world_size, parts), reference), world_size
    assert torch.equal(reference, tree_sum(list(parts), odd_factor(count)))
    exact = parts.double().sum(dim=0)
    assert torch.allclose(reference.double(), exact, atol=float(parts.abs().max()) * 1e-5)


@given(st.integers(1, 9), st.integers(0, 1000))
def test_the_sum_over_ranks_is_that_of_neighbors(ranks: int, seed: int) -> None:
    parts = leaves(ranks, seed)
    expected = tree_sum(list(parts), 1)
    assert torch.equal(pairwise_sum(parts), expected)


def test_a_sum_keeps_one_partial_sum_a_level_and_can_be_used_again() -> None:
    total = LeafSum(3)
    for _ in range(2):
        held = []
        for number in range(1, 12):
            total.add([torch.full((2,), float(number))])
            held.append(len(total._partial))
        assert held == [1, 1, 1, 2, 2, 1, 2, 2, 2, 3, 3]
        assert [float(earlier[0][0]) for earlier in total.take()] == [21.0, 24.0, 21.0]


@given(st.integers(1, 24), st.integers(0, 1000))
def test_zero_has_the_tree_s_sign_on_every_legal_world_size(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.tensor([-0.0, 0.0, 1.0, -1.0])[torch.randint(4, (count, 33), generator=generator)]
    parts[:, 0] = -0.0
    expected = tree_sum(list(parts), odd_factor(count)).numpy().tobytes()
    for world_size in elastic_world_sizes(count):
        assert sum_on(world_size, parts).numpy().tobytes() == expected, world_size


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 23, 24])
def test_a_buffer_is_reduced_in_pieces_of_any_length(ranks: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_reduce, "PIECE", 10)
    parts = leaves(ranks, length)[:, :length].contiguous()
    expected = tree_sum(list(parts), 1)
    reduce_on_threads(parts, lambda rank, group: Levels(inside=group("all", rank, ranks)))
    for part in parts:
        assert torch.equal(part, expected)


@pytest.mark.parametrize(("nodes", "node_size"), [(2, 2), (3, 2), (2, 4), (3, 4)])
def test_two_levels_have_the_bits_of_one(nodes: int, node_size: int) -> None:
    parts = leaves(nodes * node_size, 23)[:, :23].contiguous()
    expected = tree_sum(list(parts), 1)

    def levels(rank: int, group: Callable[[str, int, int], RankGroup]) -> Levels:
        node, place = divmod(rank, node_size)
        return Levels(inside=group(f"node {node}", place, node_size), across=group(f"place {place}", node, nodes))

    reduce_on_threads(parts, levels)
    for part in parts:
        assert torch.equal(part, expected)


def reduce_on_threads(
    parts: torch.Tensor, levels: Callable[[int, Callable[[str, int, int], RankGroup]], Levels]
) -> None:
    """Replace the rows of `parts` by their sum, on a thread each; `levels` of a rank, and of a maker of gloo groups."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # missing from its __all__

    def make_group(name: str, rank: int, size: int) -> RankGroup:
        own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        group = dist.ProcessGroup(own, rank, size)
        gloo = dist.ProcessGroupGloo(own, rank, size, timedelta(seconds=60))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return RankGroup(rank=rank, size=size, group=group)

    with ThreadPoolExecutor(len(parts)) as threads:
        list(threads.map(lambda rank: ordered_all_reduce(parts[rank], levels(rank, make_group)), range(len(parts))))


def test_the_gradients_of_one_rank_are_summed_in_the_tree() -> None:
    parameters = [nn.Parameter(torch.zeros(33)), nn.Parameter(torch.zeros(2))]
    gradients = OrderedGradients(parameters, 3, Levels(inside=ALONE))
    parts = leaves(6, 0)
    for _ in range(2):
        for number, leaf in enumerate(parts):
            with gradients.microbatch(parameters, last=number == 5):
                assert all(parameter.grad is None for parameter in parameters)
                parameters[0].grad, parameters[1].grad = leaf.clone(), torch.tensor([-0.0, 1.0])
        first, second = (parameter.grad for parameter in parameters)
        assert first is not None and second is not None
        assert torch.equal(first, tree_sum(list(parts), 3))
        assert second.tolist() == [0.0, 6.0]
        for parameter in parameters:
            parameter.grad = None


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_every_layout_has_the_same_state_after_every_step(make_run: Callable[..., Path], precision: str) -> None:
    seen = {}
    for ranks, parallel in LAYOUTS if precision == "fp32" else [(1, "fsdp"), (2, "ddp"), (4, "fsdp")]:
        run = make_run(f"{ranks}-{parallel}", EVERYTHING, parallel=parallel, precision=precision, **FOUR_STEPS)
        done = train(run, "--hash-every", "1", ranks=ranks, as_user=(precision, ranks, parallel) == ("fp32", 2, "fsdp"))
        assert done.returncode == 0, done.stderr
        assert "determinism elastic" in done.stdout
        keys = ("state_sha256", "train_loss", "grad_norm", "validation_loss")
        seen[ranks, parallel] = [metrics(run, key) for key in keys]
        assert final_hash(run) == seen[ranks, parallel][0][4]  # of the files as of the state in memory
    reference = seen[1, "fsdp"]
    assert len(set(reference[0].values())) == 4  # the state moved at every step
    for layout, values in seen.items():
        assert values == reference, layout


def test_without_elastic_the_world_size_shows(make_run: Callable[..., Path]) -> None:
    # Guards the tests above: their equality is not a property of this small model.
    hashes = []
    for ranks in (1, 4):
        run = make_run(str(ranks), EVERYTHING, determinism="run", **FOUR_STEPS)
        assert train(run, "--hash-every", "4", ranks=ranks).returncode == 0
        hashes.append(metrics(run, "state_sha256")[4])
    assert hashes[0] != hashes[1]


@pytest.mark.slow
def test_a_walk_over_world_sizes_and_wrappers_ends_in_the_state_of_the_straight_run(
    make_run: Callable[..., Path],
) -> None:
    small = EVERYTHING | {"emb_dim": 34}
    straight, walked = (make_run(name, small, min_train_tokens=8 * 8 * 30) for name in ("straight", "walked"))
    assert train(straight, "--hash-every", "1", ranks=2).returncode == 0
    for ranks, parallel, last in ((4, "fsdp", "2"), (2, "ddp", "4"), (1, "ddp", "6"), (2, "fsdp", "8")):
        options = ("--set", f"parallel={parallel}", "--max-steps", last, "--hash-every", "1")
        done = train(walked, *options, ranks=ranks)
        assert done.returncode == 0, done.stderr
    for key in ("state_sha256", "train_loss", "grad_norm"):
        assert metrics(walked, key) == metrics(straight, key), key


def test_other_numerics_are_refused_by_name_unless_allowed_and_then_recorded(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert train(run, "--max-steps", "2").returncode == 0
    refused = train(run, "--set", "cpu_threads=2", "--set", "microbatch_size=4")
    assert refused.returncode == 1
    assert "made with other numerics (cpu_threads: 1 -> 2; microbatch_size: 2 -> 4)" in refused.stderr
    assert "pass --allow-numerics-drift, which the metrics will show" in refused.stderr
    elsewhere = train(run, "--max-steps", "3", environment={"ATEN_CPU_CAPABILITY": "default"})
    assert "ATEN_CPU_CAPABILITY: None -> default; cpu_capability: " in elsewhere.stderr
    allowed = train(run, "--set", "cpu_threads=2", "--allow-numerics-drift", "--max-steps", "3")
    assert allowed.returncode == 0
    assert "WARNING: numerics changed since step-00000002: cpu_threads: 1 -> 2" in allowed.stderr
    changes = [record["changes"] for record in read_metrics(run) if record.get("event") == "numerics-drift"]
    assert changes == [["cpu_threads: 1 -> 2"]]


@pytest.mark.slow
def test_on_three_ranks_a_resumed_run_has_the_bits_of_the_straight_one(make_run: Callable[..., Path]) -> None:
    # DDP regroups its buckets after the first step of a process; a sum whose order followed them would show it.
    settings = {"global_batch_size": 6, "determinism": "run", "min_train_tokens": 4 * 6 * 30}
    straight, resumed = (make_run(name, EVERYTHING, **settings) for name in ("straight", "resumed"))
    assert train(straight, "--hash-every", "1", ranks=3).returncode == 0
    for last in ("2", "4"):
        assert train(resumed, "--hash-every", "1", "--max-steps", last, ranks=3).returncode == 0
    assert metrics(resumed, "state_sha256") == metrics(straight, "state_sha256")


def test_a_replay_repeats_recorded_steps_elsewhere_and_touches_nothing(make_run: Callable[..., Path]) -> None:
    run = make_run(model={"drop_rate": 0.1})
    assert train(run, "--hash-every", "1", "--set", "parallel=fsdp", ranks=2).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = train(run, "--replay", "6", "7")
    assert done.returncode == 0, done.stderr
    assert f"replaying from {run}/checkpoints/step-00000004 at step 4; nothing is written" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[-1:] in (["same"], ["DIFFERENT"])]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        (step, key, "same") for step in "67" for key in ("train_loss", "grad_norm", "state_sha256")
    ]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    other = train(run, "--replay", "1", "2", "--set", "learning_rate=0.02")
    assert other.returncode == 1
    assert "replaying from the start" in other.stdout
    assert "DIFFERENT" in other.stdout
    beyond = train(run, "--replay", "3", "9")
    assert beyond.returncode == 1
    assert "--replay 3 9: wanted steps from 1 to 8, the first one first" in beyond.stderr


@pytest.mark.parametrize("model", [MODERN[0], pytest.param(MODERN[1], marks=pytest.mark.slow)])
def test_modern_blocks_have_the_same_state_on_every_layout(
    make_run: Callable[..., Path], model: dict[str, Any]
) -> None:
    hashes = []
    for ranks, parallel in [(1, "ddp"), (2, "ddp"), (2, "fsdp")]:
        run = make_run(f"{ranks}-{parallel}", EVERYTHING | model, parallel=parallel, precision="bf16", **FOUR_STEPS)
        done = train(run, "--hash-every", "1", ranks=ranks)
        assert done.returncode == 0, done.stderr
        hashes.append(metrics(run, "state_sha256"))
    assert hashes[0] == hashes[1] == hashes[2]
    assert len(set(hashes[0].values())) == 4


@pytest.mark.slow
def test_an_odd_number_of_micro_batches_is_elastic_over_its_power_of_two(make_run: Callable[..., Path]) -> None:
    hashes = []
    for ranks in (1, 2):
        run = make_run(str(ranks), global_batch_size=12, parallel="fsdp")
        assert train(run, "--hash-every", "5", "--max-steps", "5", ranks=ranks).returncode == 0
        hashes.append(metrics(run, "state_sha256"))
    assert hashes[0] == hashes[1] != {}
    refused = train(make_run("3"), "--set", "global_batch_size=6", "--set", "determinism=elastic", ranks=3)
    assert refused.returncode == 1
    assert "adds 3 micro-batches in one tree, which world size 3 does not divide" in refused.stderr
    assert "world sizes that do: 1; or set determinism to run" in refused.stderr
