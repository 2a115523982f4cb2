"""Guard: if a loss or gradient is not finite, no rank applies the update, no matter how many ranks there are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import MakeRun, metrics, train
from training.checkpoints.saved_state import verify
from training.guard import Guard
from training.parallel.process_group import Ranks
from training.supervision.run_lock import read_exit
from training.telemetry.metrics_log import read_metrics


def guard(device: str = "cpu") -> Guard:
    return Guard(Ranks(rank=0, world_size=1, device=torch.device(device), control=None, download=None))


def judge(judging: Guard, step: int, loss: float, grad_norm: float, *, excused: bool = False) -> float:
    """Return 1.0 if the guard blocks the update."""
    return judging.observe(step, torch.tensor([loss]), torch.tensor([loss, grad_norm]), excused).item()


def test_fp16_overflow_is_excused_but_a_bad_loss_is_not() -> None:
    judging = guard()
    steps = [(1.0, 1.0, True), (2.0, torch.inf, True), (1.0, 1.0, True), (torch.nan, 1.0, True), (1.0, 1.0, True)]
    blocked = [judge(judging, step, loss, norm, excused=excused) for step, (loss, norm, excused) in enumerate(steps)]
    assert blocked == [0.0, 1.0, 0.0, 1.0, 1.0]


def test_guard_reads_nothing_from_the_device() -> None:
    judging = guard("meta")  # a device from which no value can be read
    numbers = torch.zeros(2, device="meta")
    update_blocked = judging.observe(0, numbers, numbers, torch.tensor(False, device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        update_blocked.item()


POISON = {
    "loss": "plain = step.microbatch_loss; step.microbatch_loss = lambda *arguments: plain(*arguments) * torch.nan",
    "gradient": "next(iter(state.parallel.named_parameters().values())).register_hook(lambda grad: grad * torch.inf)",
}


@pytest.mark.parametrize(
    ("kind", "ranks", "bad_ranks"), [("loss", 1, (0,)), ("loss", 2, (0, 1)), ("loss", 2, (1,)), ("gradient", 2, (0, 1))]
)
def test_update_from_a_bad_loss_or_gradient_is_never_applied(
    make_run: MakeRun, at_step_3: Callable[..., Path], kind: str, ranks: int, bad_ranks: tuple[int, ...]
) -> None:
    run = make_run(checkpoint_interval=2)
    done = train(run, ranks=ranks, script=at_step_3(POISON[kind], bad_ranks))
    assert done.returncode == (3 if ranks == 1 else 1)  # torchrun exits with 1 for any failure
    assert ranks == 1 or "exitcode  : 3" in done.stderr
    problem = f"the loss is not finite on rank {', '.join(map(str, bad_ranks))}"
    problem = problem if kind == "loss" else "the gradient norm is not finite, although every loss is finite"
    assert f"step 3: {problem}; the update was not applied" in done.stderr
    assert done.stderr.count("is not finite") == min(ranks, 2)  # the second one is in torchrun's table
    assert list(metrics(run, "train_loss")) == [1, 2]
    assert [record["event"] for record in read_metrics(run) if "event" in record][-1] == "diverged"
    job_exit = read_exit(run)
    assert job_exit is not None and (job_exit.status, job_exit.reason) == (3, "non-finite")
    [checkpoint] = (run / "checkpoints").glob("step-*")
    assert checkpoint.name == "step-00000002" and verify(checkpoint) is None
    assert train(run).returncode == 0  # the run continues from that checkpoint


def test_lasting_overflow_ends_an_fp16_run(make_run: MakeRun, at_step_3: Callable[..., Path]) -> None:
    run = make_run(min_train_tokens=40 * 256, validation_interval=None)
    done = train(run, "--set", "precision=fp16", script=at_step_3(POISON["gradient"], (0,)))
    assert done.returncode == 3, done.stderr
    assert "the gradient norm is not finite, although every loss is finite" in done.stderr
    norms = metrics(run, "grad_norm")
    assert norms[2] is not None
    assert {norms[step] for step in norms if step > 2} == {None}
    assert len(norms) >= 2 + 16  # the run ends only after the scale has fallen from 2 ** 16 to below 1
