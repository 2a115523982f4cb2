"""The same bits on any world size: sums in one tree, and hashes of real runs.

Hashes are compared within one run of this suite, never with recorded ones: another torch or CPU has other bits.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.conftest import metrics, train
from tests.model.architectures import NANOCHAT, QWEN3
from tests.walks import final_hash
from tokens.batches.rank_shares import odd_factor, rank_shares
from training.parallel.exchange import exchanges
from training.parallel.mesh import Levels
from training.parallel.ordered_reduce import LeafSum, OrderedGradients
from training.parallel.process_group import ALONE
from training.parallel.sum_tree import SumTree, leaf, step_tree
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
    """Return the sum as so many ranks compute it, each adding its contiguous share of leaves first."""
    tree, sums = step_tree("elastic", len(parts), 1), []
    shares = rank_shares(len(parts), world_size)
    for share in shares:
        total = LeafSum(tree, share)
        *first, last = [[half.clone() for half in parts[number].split(20)] for number in share]
        for gradients in first:
            total.add(gradients)
        apart, joined = total.take()
        for earlier in joined:
            torch._foreach_add_(last, earlier)
        sums += [torch.cat(halves) for halves in (*apart, last)]
    rounds, [place] = tree.additions([part for share in shares for part in tree.partial_sums(map(leaf, share))])
    for pairs in rounds:
        torch._foreach_add_([sums[place] for place, _ in pairs], [sums[added] for _, added in pairs])
    return sums[place]


def tree_sum(parts: list[torch.Tensor], run: int) -> torch.Tensor:
    """Return the sum as documented: runs of leaves in order, then neighbors, level by level."""
    level = [functools.reduce(torch.add, parts[begin : begin + run]) for begin in range(0, len(parts), run)]
    while len(level) > 1:
        pairs = [torch.add(*level[index : index + 2]) for index in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


@given(st.integers(1, 64), st.integers(0, 1000))
def test_the_sum_has_the_same_bits_on_every_world_size(count: int, seed: int) -> None:
    parts = leaves(count, seed)
    reference = sum_on(1, parts)
    for world_size in range(1, count + 1):
        assert torch.equal(sum_on(world_size, parts), reference), world_size
    assert torch.equal(reference, tree_sum(list(parts), odd_factor(count)))
    exact = parts.double().sum(dim=0)
    assert torch.allclose(reference.double(), exact, atol=float(parts.abs().max()) * 1e-5)


def test_a_sum_keeps_one_partial_sum_a_level_and_can_be_used_again() -> None:
    total = LeafSum(SumTree(24, 3), range(12))
    for _ in range(2):
        held = []
        for number in range(1, 12):
            total.add([torch.full((2,), float(number))])
            held.append(len(total._sums))
        assert held == [1, 1, 1, 2, 2, 1, 2, 2, 2, 3, 3]
        apart, joined = total.take()
        assert apart == [] and [float(earlier[0][0]) for earlier in joined] == [21.0, 24.0, 21.0]


@given(st.integers(1, 24), st.integers(0, 1000))
def test_zero_has_the_tree_s_sign_on_every_world_size(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.tensor([-0.0, 0.0, 1.0, -1.0])[torch.randint(4, (count, 33), generator=generator)]
    parts[:, 0] = -0.0
    expected = tree_sum(list(parts), odd_factor(count)).numpy().tobytes()
    for world_size in range(1, count + 1):
        assert sum_on(world_size, parts).numpy().tobytes() == expected, world_size


def test_the_gradients_of_one_rank_are_summed_in_the_tree() -> None:
    parameters, tree = [nn.Parameter(torch.zeros(33)), nn.Parameter(torch.zeros(2))], SumTree(6, 3)
    gradients = OrderedGradients(parameters, tree, range(6), exchanges(tree, [range(6)], Levels(inside=ALONE)))
    parts = leaves(6, 0)
    for _ in range(2):
        for number, part in enumerate(parts):
            with gradients.microbatch(parameters, last=number == 5, idle=False):
                assert all(parameter.grad is None for parameter in parameters)
                parameters[0].grad, parameters[1].grad = part.clone(), torch.tensor([-0.0, 1.0])
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
