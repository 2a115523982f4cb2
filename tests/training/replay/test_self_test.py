"""The self-test reports which gradients repeat and which do not, and does not affect training."""

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from tests.conftest import MakeRun, complete, metrics
from tests.training.conftest import state_of
from training.exactness.fingerprint import set_determinism
from training.parallel.process_group import Ranks
from training.precision import Numerics
from training.replay.self_test import SelfTest, describe, self_test
from training.state import StepSettings, TrainState
from training.telemetry.metrics_log import read_metrics

Parts = tuple[TrainState, StepSettings, Ranks]
NETWORK = {"drop_rate": 0.1, "tie_weights": False, "emb_dim": 34, "context_length": 30}
FOUR_STEPS = 4 * 8 * 30


@pytest.fixture
def parts(make_run: MakeRun, alone: Ranks) -> Parts:
    return *state_of(make_run(model={"drop_rate": 0.1}), alone), alone


def disturb(state: TrainState, name: str, *, runs: int = 10**6) -> None:
    """In each of the first `runs` micro-steps, change a parameter's gradient slightly, as atomic additions would."""
    calls = 0

    def change(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient * (1 + 1e-6 * calls) if calls <= runs else gradient

    state.parallel.named_parameters()[name].register_hook(change)


def test_gradients_repeat_and_are_cleared(parts: Parts) -> None:
    before = {name: tensor.clone() for name, tensor in parts[0].parallel.network.state_dict().items()}
    assert self_test(*parts).differing == []
    assert parts[0].parallel.gradients() == []
    assert parts[0].optimizer.steps == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in parts[0].parallel.network.state_dict().items())


def test_differing_gradients_are_named_in_network_order(parts: Parts) -> None:
    names = ["blocks.0.attention.qkv.weight", "blocks.1.mlp.up.bias", "final_norm.weight"]
    disturb(parts[0], names[2], runs=1)  # only the first of 2 x 4 micro-steps
    for name in reversed(names[:2]):
        disturb(parts[0], name)
    assert self_test(*parts).differing == names


@pytest.mark.slow
def test_fp16_overflow_does_not_hide_a_difference(parts: Parts) -> None:
    disturb(parts[0], "final_norm.weight")
    parts[0].loss_scale.dynamic = True
    parts[0].loss_scale.scale.fill_(2.0**127)
    assert self_test(*parts).differing == ["final_norm.weight"]
    assert parts[0].loss_scale.scale.item() == 2.0**127


# A script for torchrun that does the self-test as on a GPU. With DISTURB, rank 1's gradient is different each time.
AS_ON_A_GPU = """
import itertools

job.needs_self_test = lambda settings, ranks: True
plain, counter = self_test.run_microbatches, itertools.count()


def disturbed(state, settings, step, next_batch):
    losses = plain(state, settings, step, next_batch)
    if state.parallel.data_parallel.rank == 1:
        mesh.local_tensor(state.parallel.named_parameters()["blocks.1.mlp.up.weight"].grad)[0] += next(counter)
    return losses


if "DISTURB" in os.environ:
    self_test.run_microbatches = disturbed
"""


@pytest.mark.slow
def test_self_test_does_not_change_the_bits(make_run: MakeRun, changed_train: Callable[[str], Path]) -> None:
    script = changed_train(AS_ON_A_GPU)
    plain = make_run("plain", NETWORK, min_train_tokens=FOUR_STEPS, validation_interval=None)
    complete(plain, "--hash-every", "1", ranks=2)
    for parallel, parts in (("ddp", ["4"]), ("fsdp", ["2", "4"])):  # the last job begins by loading a checkpoint
        run = make_run(parallel, NETWORK, min_train_tokens=FOUR_STEPS, validation_interval=None, parallel=parallel)
        for last in parts:
            done = complete(run, "--hash-every", "1", "--max-steps", last, ranks=2, script=script)
            expected = "repeat bit for bit (deterministic attention, cuBLAS workspace :4096:8, not compiled)"
            assert f"self-test: the gradients of one step {expected}, as determinism elastic requires; " in done.stdout
        for key in ("state_sha256", "train_loss", "grad_norm"):
            assert metrics(run, key) == metrics(plain, key), (parallel, key)
        events = [record["held"] for record in read_metrics(run) if record.get("event") == "self-test"]
        assert events == [True] * len(parts)
    assert json.loads((plain / "resolved.json").read_text())["self_test"] is None  # a CPU needs no self-test


def test_difference_on_one_rank_reaches_all_ranks(make_run: MakeRun, changed_train: Callable[[str], Path]) -> None:
    run, script = make_run(parallel="fsdp", validation_interval=None), changed_train(AS_ON_A_GPU)
    done = complete(run, "--max-steps", "1", ranks=2, script=script, environment={"DISTURB": "1"})
    assert "gradients of the same step differ between two runs (first: blocks.1.mlp.up.weight; 1 of 28" in done.stderr
    assert "determinism elastic does not hold on this machine" in done.stderr
    outcome = {"held": False, "differing": ["blocks.1.mlp.up.weight"], "tensors": 28}
    assert json.loads((run / "resolved.json").read_text())["self_test"] == outcome
    [event] = [record for record in read_metrics(run) if record.get("event") == "self-test"]
    assert event.items() >= outcome.items()


def test_failed_self_test_gives_advice() -> None:
    numerics = Numerics(determinism="run", precision="bf16", compiled=True)
    outcome = SelfTest(held=False, differing=["a.weight", "b.weight"], tensors=148)
    line = str(describe(outcome, numerics))
    assert line.startswith("WARNING: self-test: ")
    assert "(first: a.weight; 2 of 148 tensors). determinism run does not hold on this machine" in line
    assert "try --set compile=false; --set determinism=off" in line
    assert "compile" not in str(describe(outcome, attrs.evolve(numerics, compiled=False)))


def test_exact_levels_avoid_attention_that_varies(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that monkeypatch restores the variable afterwards
    try:
        set_determinism("run", 1, alone)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)
