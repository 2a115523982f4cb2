"""Asynchronous writer: a full disk does not stop a run, and a failed save is tried again at the next checkpoint."""

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MakeRun, complete, in_terminal, metrics, train, train_command
from tests.launch import wait_until
from tests.training.supervision.runs import start
from tests.walks import events, final_hash
from training.checkpoints.saved_state import verify

LONG = {"min_train_tokens": 80 * 8 * 32, "validation_interval": None, "checkpoint_interval": 10}
FULL = 60_000  # largest allowed file size in bytes, which is less than the weights need


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_full_disk_does_not_stop_a_run(make_run: MakeRun, ranks: int) -> None:
    straight, run = (make_run(name, **LONG) for name in ("straight", "full"))
    process = start(run, ranks, file_bytes=FULL, SLOW_STEP=0.03)
    wait_until(lambda: bool(events(run, "checkpoint-failed")), process)
    failure = events(run, "checkpoint-failed")[0]
    assert "File too large" in failure["problem"]
    assert not list((run / "checkpoints").glob("step-*"))
    for worker in [process.pid, *process.children()]:
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"WARNING: step {failure['step']}: NOT SAVED, to be tried again at the next checkpoint" in errors
    assert events(run, "checkpoint")[-1]["step"] == 80
    assert not list((run / "checkpoints").glob(".partial-*"))
    complete(straight, ranks=1)
    assert metrics(run, "train_loss") == metrics(straight, "train_loss")
    assert final_hash(run) == final_hash(straight)


@pytest.mark.slow
def test_failed_save_stays_in_the_bar_until_success(make_run: MakeRun) -> None:
    run = make_run(min_train_tokens=24 * 8 * 32, validation_interval=None)
    status, lines = in_terminal(["prlimit", f"--fsize={FULL}", *train_command(run, ranks=1)])
    assert status == 1  # the last save failed as well
    assert any("20/24" in line and "loss " in line and line.endswith("NOT SAVED") for line in lines), lines
    assert "NOT SAVED" not in complete(run).stderr


@pytest.mark.slow
def test_unsaved_last_checkpoint_is_reported(make_run: MakeRun) -> None:
    run = make_run()
    complete(run, "--max-steps", "4")
    done = train(run, ranks=2, file_bytes=FULL)
    assert done.returncode == 1
    message = "the last steps are not saved, but older checkpoints are unchanged"
    assert done.stderr.count(message) == 2  # the second one is in torchrun's table of failures
    assert [path.name for path in (run / "checkpoints").glob("*step-*")] == ["step-00000004"]
    assert verify(run / "checkpoints" / "step-00000004") is None
    record = json.loads((run / "exit.json").read_text())
    assert (record["outcome"], record["reason"]) == ("error", "user-error") and message in record["problem"]
    complete(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_failure_of_pruning_does_not_end_a_run(
    make_run: MakeRun, changed_train: Callable[[str], Path], ranks: int
) -> None:
    run, broken = make_run(), "from training.checkpoints import writer; writer.prune_disk = lambda *_: 1 / 0"
    done = train(run, script=changed_train(broken), ranks=ranks)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("rank 0: ZeroDivisionError: division by zero") == 2
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000004", "step-00000008"]
