"""experiment.py sweep as a process: killed, stopped, over budget, by hand; always the same table."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from common.json_files import read_json
from tests.conftest import ROOT
from tests.experiments.conftest import MakeSweep, start_sweep, sweep
from tests.launch import Process
from training.supervision.run_lock import is_locked

LONG = {"set": {"train.min_train_tokens": 40 * 8 * 32, "train.checkpoint_interval": 10}}


def table(directory: Path) -> bytes:
    return (directory / "sweep.json").read_bytes()


def wait_until(condition: Callable[[], bool], process: Process) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.01)


def steps(directory: Path, run: str = "*") -> int:
    """Return how many steps all runs have logged, repeated ones included."""
    return sum(path.read_text().count("train_loss") for path in directory.glob(f"{run}/metrics.jsonl"))


def kill(process: Process, *, whole: bool) -> None:
    """Kill experiment.py, and with `whole` its jobs."""
    pids = process.children() if whole else []
    for pid in [process.pid, *pids]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_killed_five_times_a_sweep_has_the_table_of_an_undisturbed_one(make_sweep: MakeSweep, whole: bool) -> None:
    file = make_sweep(**LONG)
    undisturbed, disturbed = file.with_name("undisturbed"), file.with_name("disturbed")
    sweep(file, "--output", undisturbed).check_returncode()
    for moment in (0, 1, 25, 60, 100):
        process = start_sweep(file, "--output", disturbed)
        wait_until(lambda moment=moment: steps(disturbed) >= moment, process)  # type: ignore[misc]
        kill(process, whole=whole)
    done = sweep(file, "--output", disturbed)
    assert done.returncode == 0, done.stderr
    assert table(disturbed) == table(undisturbed)
    assert (disturbed / "sweep.md").read_bytes() == (undisturbed / "sweep.md").read_bytes()


def test_what_is_done_is_not_trained_again_without_its_checkpoints_and_its_results_stay(make_sweep: MakeSweep) -> None:
    file = make_sweep()
    output = file.with_suffix("")
    first = sweep(file)
    trained, results = steps(output), table(output)
    assert "no difference found" in first.stdout or "by 0." in first.stdout
    for options in ([], ["--collect"]):
        assert sweep(file, *options).stdout == first.stdout
        for checkpoints in output.glob("*/checkpoints"):
            shutil.rmtree(checkpoints)
    again = sweep(file)
    assert again.stdout == first.stdout
    assert steps(output) == trained
    assert "training" not in again.stderr
    (output / "base-seed-42" / "metrics.jsonl").unlink()
    collected = sweep(file, "--collect").stdout
    assert "sweep.md: kept as it is: it has results that are here no more: base-seed-42" in collected
    assert table(output) == results


def test_a_file_of_the_user_in_the_place_of_results_is_refused_and_left(make_sweep: MakeSweep) -> None:
    file = make_sweep()
    content = file.read_bytes()
    refused = sweep(file, "--output", file.parent)
    assert (
        refused.returncode == 1
        and "sweep.json: is not a result of experiment.py sweep, and is left as it is" in refused.stderr
    )
    assert file.read_bytes() == content


def test_a_job_that_a_killed_call_left_behind_is_adopted(make_sweep: MakeSweep) -> None:
    file = make_sweep(**LONG, seeds=1)
    output = file.with_suffix("")
    process = start_sweep(file, "--at-once", 1)
    wait_until(lambda: steps(output) >= 2, process)
    kill(process, whole=False)
    assert is_locked(output / "base-seed-42")
    done = sweep(file)
    assert done.returncode == 0, done.stderr
    assert "base-seed-42: a job trains it already" in done.stderr
    assert (output / "base-seed-42" / "metrics.jsonl").read_text().count('"start"') == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_stops_all_runs_with_checkpoints(make_sweep: MakeSweep, number: int, status: int) -> None:
    file = make_sweep(
        set={"train.max_epochs": 999, "train.min_train_tokens": 4000 * 8 * 32, "train.checkpoint_interval": 4000},
        seeds=1,
    )
    output = file.with_suffix("")
    process = start_sweep(file, "--at-once", 2)
    wait_until(lambda: all(steps(output, run) >= 3 for run in ("base*", "learning*")), process)
    process.send_signal(number)
    stdout, stderr = process.communicate()
    assert process.returncode == status, stdout + stderr
    for run in ("base-seed-42", "learning_rate=0.05-seed-42"):
        assert not is_locked(output / run)
        assert (output / run / "checkpoints" / "latest").exists()
    if number == signal.SIGTERM:
        assert "stopped by SIGTERM: 0 of 2 runs are done; missing: base-seed-42 (at step" in stdout
        assert "no verdict yet" in stdout


@pytest.mark.slow
def test_a_budget_is_never_exceeded_and_what_is_missing_is_said(make_sweep: MakeSweep) -> None:
    file = make_sweep(
        set={"train.max_epochs": 999, "train.min_train_tokens": 100_000 * 8 * 32, "train.checkpoint_interval": 1000}
    )
    output, hours = file.with_suffix(""), 26 / 3600
    budget = ("--max-usd", 2 * hours, "--price-per-hour", 2.0, "--at-once", 2)
    began = time.monotonic()
    process = start_sweep(file, *budget)
    wait_until(lambda: steps(output) >= 3, process)
    kill(process, whole=False)  # its jobs go on, and have limits of their own
    done = sweep(file, *budget)
    assert time.monotonic() - began < 26
    assert done.returncode == 75, done.stdout + done.stderr
    assert re.search(
        r"\d s of the budget are left, a job needs 18 s: 0 of 4 runs are done; missing: base-seed-42 \(at step",
        done.stdout,
    )
    assert "learning_rate=0.05-seed-43 (not begun)" in done.stdout
    assert "$0.01 of $0.01 spent; the same command with a larger budget continues" in done.stdout
    assert (output / "base-seed-42" / "checkpoints" / "latest").exists()
    assert sweep(file, *budget).returncode == 75  # and starts nothing


def test_a_second_call_on_the_same_directory_is_refused(make_sweep: MakeSweep) -> None:
    file = make_sweep(set={"train.max_epochs": 999, "train.min_train_tokens": 4000 * 8 * 32}, seeds=1)
    first = start_sweep(file)
    wait_until(lambda: steps(file.with_suffix("")) > 0, first)
    second = sweep(file)
    assert second.returncode == 1
    assert "another experiment.py works there" in second.stderr
    first.send_signal(signal.SIGTERM)
    first.communicate()


def test_a_run_that_fails_stops_the_sweep_with_its_error(make_sweep: MakeSweep) -> None:
    file = make_sweep(seeds=1)
    run = file.with_suffix("") / "base-seed-42"
    sweep(file, "--print-commands").check_returncode()
    (run / "metrics.jsonl").mkdir()
    failed = sweep(file)
    assert failed.returncode == 1
    assert "metrics.jsonl" in failed.stderr
    (run / "metrics.jsonl").rmdir()
    assert sweep(file).returncode == 0


def test_a_diverged_run_is_a_result(make_sweep: MakeSweep) -> None:
    levers = {"wild": {"train.learning_rate": 1e30, "train.clipping_max_norm": None}}
    done = sweep(make_sweep(levers=levers, set={"train.warmup_period_percent": 0}))
    assert done.returncode == 0, done.stderr
    assert "diverged in 2 of 2 seeds" in done.stdout


@pytest.mark.slow
def test_commands_printed_and_run_by_hand_give_the_same_table(make_sweep: MakeSweep) -> None:
    file = make_sweep(seeds=1)
    one, two = file.with_name("one"), file.with_name("two")
    sweep(file, "--output", one).check_returncode()
    printed = sweep(file, "--output", two, "--print-commands").stdout.splitlines()
    assert len(printed) == 2
    assert "0/1" in sweep(file, "--output", two, "--collect").stdout
    for line in printed:
        words = shlex.split(line)
        assert words[0] == "python"
        subprocess.run([sys.executable, *words[1:]], cwd=ROOT, check=True, capture_output=True)
    assert "no verdict: one seed" in sweep(file, "--output", two, "--collect").stdout
    assert table(one) == table(two)


@pytest.mark.slow
def test_halving_stops_losers_at_the_rung_and_changes_nothing_else(make_sweep: MakeSweep) -> None:
    levers = {"train.learning_rate": [0.01, 0.02, 1e-6, 2e-6]}
    file = make_sweep(levers=levers, halving={"factor": 3, "rungs": [0.375]}, set=LONG["set"])
    output, whole = file.with_suffix(""), file.with_name("whole")
    process = start_sweep(file)
    wait_until(lambda: steps(output) >= 60, process)
    kill(process, whole=True)
    done = sweep(file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stopped at step 15 by the rule") == 2
    assert "at 38% of the steps the best 1/3 go on" in done.stdout
    keys = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in keys.items() if key != "halving"}))
    sweep(file, "--output", whole).check_returncode()
    halved, full = (read_json(directory / "sweep.json")["variants"] for directory in (output, whole))
    assert [one["losses"] for one in halved[:2]] == [one["losses"] for one in full[:2]]


def test_a_dataset_that_is_nowhere_is_a_warning_of_a_dry_run_and_refused_before_training(make_sweep: MakeSweep) -> None:
    file = make_sweep(set={"train.dataset": "/nope"})
    shown = sweep(file, "--dry-run")
    assert shown.returncode == 0 and "WARNING: " in shown.stdout and "/nope is no directory here" in shown.stdout
    refused = sweep(file)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert "/nope is no directory here; prepare it with" in refused.stderr and "--token-files" not in refused.stderr
    assert not file.with_suffix("").exists()


def test_a_table_that_cannot_be_written_is_printed(make_sweep: MakeSweep) -> None:
    file = make_sweep()
    absent = sweep(file, "--collect")
    assert absent.returncode == 1 and "nothing trained there yet" in absent.stderr
    (file.with_suffix("") / "sweep.md").mkdir(parents=True)
    shown = sweep(file, "--collect")
    assert shown.returncode == 1 and "sweep.md: cannot be written" in shown.stderr
    assert "Missing: base-seed-42, base-seed-43, " in shown.stdout


def test_a_dry_run_writes_nothing_and_says_what_the_seeds_can_find(make_sweep: MakeSweep) -> None:
    file = make_sweep(seeds=3)
    shown = sweep(file, "--dry-run").stdout
    assert "2 variants x 3 seeds: 6 runs, 12,288 tokens" in shown
    assert "3 seeds find a difference of 5.5 seed deviations" in shown
    assert "5 seeds find one of 3" in shown
    assert not file.with_suffix("").exists()
