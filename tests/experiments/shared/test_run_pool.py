"""The pool of runs: several ranks, pauses, separate devices. The user's own jobs are not stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from common.launch import JOB_VARIABLE, job_seconds, setting
from experiments.shared import run_pool, training_jobs
from experiments.shared.account import Account
from experiments.shared.run_pool import PoolStopped, RunPool
from experiments.shared.run_progress import read_progress
from experiments.shared.training_jobs import PoolOptions
from tests import launch
from tests.conftest import ROOT, MakeRun
from training.supervision.run_lock import EXIT_FILE, lock_is_held, take_run_lock
from training.supervision.training_process import JOB_LOG, JobEnd, TrainingProcess
from training.telemetry.budget import Budget
from training.telemetry.metrics_log import ACCOUNT, read_metrics

STEPS = 20_000
LONG = {"min_train_tokens": STEPS * 8 * 32, "max_epochs": 100_000}


@pytest.mark.slow
def test_two_paused_ranks_have_the_losses_of_one_rank(make_run: MakeRun, tmp_path: Path) -> None:
    two_ranks, one_rank = make_run("two"), make_run("one")
    with RunPool(tmp_path, PoolOptions(device="cpu", ranks=2)) as pool:
        pool.train({two_ranks: 3})
        assert read_progress(two_ranks).steps == 3
        assert 3 in read_progress(two_ranks).losses
        pool.train({two_ranks: None})
    assert {line["world_size"] for line in read_metrics(two_ranks) if line.get("event") == "start"} == {2}
    with RunPool(tmp_path, PoolOptions(device="cpu")) as pool:
        pool.train({one_rank: None, two_ranks: None})
    assert read_progress(one_rank).losses[8] == read_progress(two_ranks).losses[8]


def test_concurrent_jobs_have_separate_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_jobs, "_gpus", lambda _: ["2", "5", "7"])
    devices = training_jobs.PoolDevices.of(PoolOptions(ranks=1, at_once=2))
    assert devices.free([]) == ["2"] and devices.free([["2"]]) == ["5"] and devices.free([["2"], ["5"]]) is None
    assert devices.environment(["5"]) == {"CUDA_VISIBLE_DEVICES": "5"}
    with pytest.raises(BadInput, match="--at-once 2 x --ranks 2: needs 4 GPUs, but this machine has 3"):
        training_jobs.PoolDevices.of(PoolOptions(ranks=2, at_once=2))


@pytest.mark.slow
def test_a_signal_reaches_a_job_that_is_starting(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SignalledAtStart(TrainingProcess):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run_pool, "TrainingProcess", SignalledAtStart)
    run = make_run("run", **LONG)
    with RunPool(tmp_path, PoolOptions(device="cpu")) as pool, pytest.raises(PoolStopped, match="stopped by SIGTERM"):
        pool.train({run: None})
    assert not lock_is_held(run)
    assert read_progress(run).steps < STEPS


@pytest.mark.slow
def test_runs_of_the_user_are_not_stopped(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("run", **LONG)
    job = launch.start(ROOT / "train.py", str(run), "--device", "cpu")
    try:
        launch.wait_until(lambda: lock_is_held(run), job)
        with RunPool(tmp_path, PoolOptions(device="cpu")) as pool, pytest.raises(KeyboardInterrupt):
            timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                pool.train({run: None})
            finally:
                timer.cancel()  # a SIGINT after the end of the pool would stop the test runner
        hours = pool.account.elapsed_seconds() / 3600 + (run_pool.KILL_SECONDS + 2) / 3600
        options = PoolOptions(device="cpu", budget=Budget(max_hours=hours))
        with RunPool(tmp_path, options) as pool, pytest.raises(PoolStopped):
            pool.train({run: None})
        assert lock_is_held(run) and job.poll() is None
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait(60)


@pytest.mark.parametrize("killed", [True, False])
def test_jobs_of_a_killed_call_keep_their_devices(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, killed: bool
) -> None:
    locked, unlocked = make_run("held"), make_run("other")
    spent = {"seconds": 1000, "usd": 0, "unpriced_seconds": 1000}
    line = {"time": time.time() - 4000, "spent": spent, "price_per_hour": None, "ended": not killed}
    (tmp_path / ACCOUNT).write_text(f"{json.dumps(line)}\n")
    lock = take_run_lock(locked).file
    assert lock is not None
    free: list[bool] = []

    def command(*_: Any, **__: Any) -> list[str]:
        free.append(lock.closed)
        return ["-c", "raise SystemExit(1)"]

    monkeypatch.setattr(run_pool, "train_command", command)
    timer = threading.Timer(1.0, lock.close)
    with RunPool(tmp_path, PoolOptions(device="cpu", at_once=2)) as pool, pytest.raises(BadInput, match="failed"):
        timer.start()
        pool.train({unlocked: None, locked: None})
    timer.join()
    assert free[0] is killed
    assert pool.account.earlier.seconds == pytest.approx(5000 - job_seconds() if killed else 1000, abs=60)


@pytest.mark.skipif(sys.platform != "linux", reason="this signal requires Linux")
def test_jobs_get_sigterm_when_the_experiment_is_killed(tmp_path: Path) -> None:
    job = "import signal; print(signal.sigwait({signal.SIGTERM}), flush=True)"
    start = (
        "import pathlib, signal, time; from training.supervision.training_process import TrainingProcess; "
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [15]); TrainingProcess(pathlib.Path({str(tmp_path)!r}), "
        f"['-c', {job!r}], {{}}); print(flush=True); time.sleep(99)"
    )
    parent = subprocess.Popen([sys.executable, "-c", start], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline()
    parent.kill()
    parent.communicate()
    launch.wait_until((log := tmp_path / JOB_LOG).read_text)
    assert "15" in log.read_text() or "SIGTERM" in log.read_text()


def test_a_killed_job_is_reported_as_killed(tmp_path: Path) -> None:
    process = TrainingProcess(tmp_path, ["-c", "import os; os.kill(os.getpid(), 9)"], {})
    launch.wait_until(lambda: process.end() is not None)
    assert process.end() == JobEnd(1, None, "killed by SIGKILL (out of memory?)")


@pytest.mark.parametrize("clock", [-5000, 5000])
def test_a_jobs_record_is_found_by_its_name(tmp_path: Path, clock: float) -> None:
    """The disk's clock may be slow or fast. The record of another job is ignored, regardless of its time."""
    path, fail = tmp_path / EXIT_FILE, "raise SystemExit(1)"
    record = {"status": 75, "outcome": "stopped", "final": True}

    def status_of(*lines: str) -> int | None:
        process = TrainingProcess(tmp_path, ["-c", "; ".join(["import json, os, pathlib", *lines, fail])], {})
        launch.wait_until(lambda: process._process.poll() is not None)
        if lines:
            os.utime(path, (time.time() + clock,) * 2)
        end = process.end()
        return None if end is None else end.status

    write = f"pathlib.Path({str(path)!r}).write_text(json.dumps({record} | "
    assert status_of(write + "{'job': os.environ['LOCKSTEP_JOB']}))") == 75
    assert status_of(write + "{'job': 'of another'}))") == 1
    # A record from an earlier version does not name its job.
    assert status_of(f"pathlib.Path({str(path)!r}).unlink()", write + "{}))") == 75
    assert status_of() == 1  # the record of the previous process still exists


def test_a_job_log_must_be_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / JOB_LOG)
    with pytest.raises(BadInput, match="is a pipe"):
        TrainingProcess(tmp_path, ["-c", ""], {})
    (tmp_path / JOB_LOG).unlink()
    process = TrainingProcess(tmp_path, ["-c", "import time; time.sleep(1); raise SystemExit(1)"], {})
    (tmp_path / JOB_LOG).unlink()
    launch.wait_until(lambda: process.end() is not None)
    assert process.end() == JobEnd(1, None, "it printed nothing")


def test_a_failure_names_keys_of_the_file(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "from common.launch import setting; raise SystemExit('keep fewer with ' + setting(keep_checkpoints=1))"
    monkeypatch.setattr(run_pool, "train_command", lambda *_, **__: ["-c", failing])
    with RunPool(tmp_path, PoolOptions(device="cpu")) as pool, pytest.raises(BadInput) as error:
        pool.train({make_run("run"): None})
    assert 'run: training failed: keep fewer with "set": {"train.keep_checkpoints": 1};' in str(error.value)
    assert setting(keep_checkpoints=1, parallel="fsdp") == "--set keep_checkpoints=1 --set parallel=fsdp"


def write_end(run: Path, status: int, reason: str | None) -> list[str]:
    """Return the arguments of a process that prints a misleading line and then ends like train.py."""
    record = {"status": status, "outcome": "error", "final": True, "reason": reason, "problem": "a problem"}
    record = {key: value for key, value in record.items() if value is not None}
    named = f"{record} | {{'job': os.environ['{JOB_VARIABLE}']}}"
    write = f"pathlib.Path({str(run / EXIT_FILE)!r}).write_text(json.dumps({named}))"
    return ["-c", f"import json, os, pathlib; {write}; print('train.py: --max-hours 1'); raise SystemExit({status})"]


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ((1, "out-of-budget"), "to continue, run the same command with a larger budget"),
        ((75, "out-of-budget"), "to continue, run the same command with a larger budget"),
        ((75, "stopped"), "stopped by SIGTERM"),
        ((75, None), "stopped by SIGTERM"),  # an earlier version wrote no reason, and the metrics contain no limit
        ((1, "user-error"), "training failed: a problem; see its output in"),
        ((1, "out-of-memory"), "training failed: a problem; see its output in"),
        ((1, None), "training failed: a problem; see its output in"),
        ((1, "of a later version"), "training failed: a problem; see its output in"),
    ],
)
def test_a_jobs_reason_decides_not_its_output(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: tuple[int, str | None], message: str
) -> None:
    run = make_run("run")
    monkeypatch.setattr(run_pool, "train_command", lambda *_, **__: write_end(run, *end))
    options = PoolOptions(device="cpu", budget=Budget(max_hours=1))
    with RunPool(tmp_path, options) as pool, pytest.raises((BadInput, PoolStopped), match=message):
        pool.train({run: None})


@pytest.mark.parametrize("seconds", [1, 10])
def test_a_call_without_budget_spends_nothing(make_run: MakeRun, tmp_path: Path, seconds: float) -> None:
    runs = {make_run("run"): None}
    hours = Account(tmp_path, PoolOptions()).elapsed_seconds() / 3600 + seconds / 3600
    message = r"^\d+ s of the budget are left, but a job needs 18 s: 0 of 1 runs are done; unfinished: run"
    options = PoolOptions(device="cpu", budget=Budget(max_hours=hours))
    with RunPool(tmp_path, options) as pool, pytest.raises(PoolStopped, match=message):
        pool.train(runs)
    assert not (tmp_path / ACCOUNT).exists()
