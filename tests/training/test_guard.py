"""Guard: an update of a loss or gradient that is not finite is never applied, on any world size."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import metrics, seal_again, train
from training.checkpoints.verification import verify
from training.guard import Guard
from training.parallel.process_group import Ranks


def guard(device: str = "cpu") -> Guard:
    ranks = Ranks(
        rank=0,
        world_size=1,
        device=torch.device(device),
        control=None,
        download=None,
    )
    return Guard(ranks)


def judge(judging: Guard, step: int, loss: float, grad_norm: float, *, excused: bool = False) -> float:
    """Return 1.0 where the guard holds the update back."""
    return judging.observe(step, torch.tensor([loss]), torch.tensor([loss, grad_norm]), excused).item()


def test_fp16_may_overflow_but_no_loss_that_is_not_finite_is_excused() -> None:
    judging = guard()
    steps = [(1.0, 1.0, True), (2.0, torch.inf, True), (1.0, 1.0, True), (torch.nan, 1.0, True), (1.0, 1.0, True)]
    held = [judge(judging, step, loss, norm, excused=excused) for step, (loss, norm, excused) in enumerate(steps)]
    assert held == [0.0, 1.0, 0.0, 1.0, 1.0]


def test_a_step_reads_nothing_back_from_the_device() -> None:
    judging = guard("meta")  # a device whose values nobody can read
    numbers = torch.zeros(2, device="meta")
    held = judging.observe(0, numbers, numbers, torch.tensor(False, device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        held.item()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_is_never_applied(make_run: Callable[..., Path], ranks: int) -> None:
    run = make_run(checkpoint_interval=2)
    assert train(run, "--max-steps", "2").returncode == 0
    checkpoint = run / "checkpoints" / "step-00000002"
    weights = load_file(checkpoint / "model.safetensors")
    weights["final_norm.weight"][3] = torch.inf
    save_file(weights, checkpoint / "model.safetensors")
    shutil.copy(checkpoint / "model.safetensors", run / "kept")
    seal_again(checkpoint)
    done = train(run, ranks=ranks)
    assert done.returncode == (3 if ranks == 1 else 1)  # torchrun exits with 1 for any failure
    everyone = ", ".join(str(rank) for rank in range(ranks))
    assert f"step 3: loss is not finite on rank {everyone}; the update was not applied" in done.stderr
    assert done.stderr.count("is not finite") == 1
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert (checkpoint / "model.safetensors").read_bytes() == (run / "kept").read_bytes()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    assert last["event"] == "diverged"
    if ranks == 2:
        assert "exitcode  : 3" in done.stderr


POISONED = """
import torch

import train
from training import loop, step

what, bad_ranks = {what!r}, {bad_ranks}
original = step.train_step


def poisoned(state, settings, number, next_batch):
    if number == 2 and state.parallel.data_parallel.rank in bad_ranks:
        if what == "loss":
            healthy = step.microbatch_loss
            step.microbatch_loss = lambda *arguments: healthy(*arguments) * torch.nan
        else:
            next(iter(state.parallel.named_parameters().values())).register_hook(lambda grad: grad * torch.inf)
    return original(state, settings, number, next_batch)


loop.train_step = poisoned
train.leave(train.main())
"""


@pytest.mark.parametrize(
    ("what", "bad_ranks", "message"),
    [
        ("loss", (1,), "step 3: loss is not finite on rank 1; the update was not applied"),
        ("gradient", (0, 1), "step 3: gradient norm is not finite, every loss is; the update was not applied"),
    ],
)
def test_what_is_not_finite_is_named_and_the_state_before_it_kept(
    make_run: Callable[..., Path], tmp_path: Path, what: str, bad_ranks: tuple[int, ...], message: str
) -> None:
    run = make_run(checkpoint_interval=2)
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED.format(what=what, bad_ranks=bad_ranks))
    done = train(run, ranks=2, script=script)
    assert done.returncode == 1
    assert message in done.stderr
    assert list(metrics(run, "train_loss")) == [1, 2]
    assert verify(run / "checkpoints" / "step-00000002") is None
    assert train(run).returncode == 0  # goes on from there


def test_an_overflow_that_lasts_ends_an_fp16_run_too(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(min_train_tokens=40 * 256, validation_interval=None)
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED.format(what="gradient", bad_ranks=(0,)))
    done = train(run, "--set", "precision=fp16", script=script)
    assert done.returncode == 3, done.stderr
    assert "gradient norm is not finite, every loss is" in done.stderr
    norms = metrics(run, "grad_norm")
    assert norms[2] is not None
    assert {norms[step] for step in norms if step > 2} == {None}
    assert len(norms) >= 2 + 16  # the scale fell from 2 ** 16 to below 1 first
