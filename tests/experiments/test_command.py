"""experiment.py gives the same results if it is killed, stopped or over budget, or if its runs are trained by hand."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from common.json_files import read_json
from experiments.shared.run_progress import read_progress
from tests import launch
from tests.conftest import ROOT, MakeRun, slow
from tests.experiments.conftest import MakeLadder, MakeSweep
from training.supervision.run_lock import is_locked
from training.telemetry.metrics_log import read_metrics

SCRIPT = ROOT / "experiment.py"
SHORT = {"train.min_train_tokens": 40 * 8 * 32, "train.checkpoint_interval": 10}
LONG = {"train.max_epochs": 999, "train.min_train_tokens": 100_000 * 8 * 32, "train.checkpoint_interval": 100_000}


def words(file: Path, arguments: tuple[object, ...]) -> list[str]:
    """Return the command line of an experiment. The file is named after the command."""
    return [file.stem, str(file), *map(str, arguments), "--device", "cpu"]


def run(file: Path, *arguments: object) -> Any:
    return launch.run(SCRIPT, *words(file, arguments))


def finish(file: Path, *arguments: object) -> str:
    """Run an experiment to its end, and return its output."""
    finished = run(file, *arguments)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return str(finished.stdout)


def start_until(file: Path, steps_logged: int, *arguments: object, directory: Path | None = None) -> launch.Process:
    """Start an experiment. Return as soon as its runs have logged `steps_logged` steps, or when it ends."""
    process = launch.start(SCRIPT, *words(file, arguments))
    launch.wait_until(lambda: steps(directory or file.with_suffix("")) >= steps_logged or process.poll() is not None)
    return process


def steps(directory: Path, run: str = "*") -> int:
    """Return the number of steps that all runs have logged, including repeated steps."""
    return sum(path.read_text().count("train_loss") for path in directory.glob(f"{run}/metrics.jsonl"))


def results(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.*") if path.suffix in (".md", ".json")}


def kill(process: launch.Process, *, with_jobs: bool) -> None:
    """Kill experiment.py. Unless `with_jobs` is set, its jobs survive, and save a checkpoint."""
    pids = process.children() if with_jobs else []
    for pid in [process.pid, *pids]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(launch.TIMEOUT_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moments"),
    [("sweep", (0, 1, 25, 60, 100)), ("ladder", (0, 5, 40, 90, 140)), ("measure", (0, 1, 20, 40, 56))],
)
def test_five_kills_do_not_change_the_results(
    make_sweep: MakeSweep, make_ladder: MakeLadder, token_files: Path, kind: str, moments: tuple[int, ...]
) -> None:
    file = make_ladder() if kind == "ladder" else make_sweep(set=SHORT)
    if kind == "measure":
        shutil.copytree(token_files, second_dataset := file.with_name("other"))
        measure = {"dataset": str(token_files), "count": 2000}
        weights = {"alone": [0, 1], "mostly": [1, 3], "equal": [1, 1]}
        levers = {
            name: {"train.dataset": [{"dataset": str(source), "weight": weight} for source, weight in parts if weight]}
            for name, pair in weights.items()
            for parts in [list(zip((token_files, second_dataset), pair, strict=True))]
        }
        file = make_sweep(file.with_name("base"), levers=levers, measure=measure, set=SHORT)
    undisturbed, disturbed = file.with_name("undisturbed"), file.with_name("disturbed")
    first = run(file, "--output", undisturbed)
    for number, moment in enumerate(moments):
        kill(start_until(file, moment, "--output", disturbed, directory=disturbed), with_jobs=number % 2 == 1)
    last = run(file, "--output", disturbed)
    assert last.returncode == first.returncode, last.stderr
    assert results(disturbed) == results(undisturbed) and len(results(disturbed)) == 2
    trained = steps(disturbed)
    for checkpoints in disturbed.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)  # a user may do this to free disk space; the results are in the metrics
    assert run(file, "--output", disturbed).stdout == last.stdout and steps(disturbed) == trained


def test_finished_runs_are_not_trained_again(make_sweep: MakeSweep) -> None:
    file = make_sweep()
    output = file.with_suffix("")
    first = finish(file)
    trained, first_results = steps(output), results(output)
    assert "no difference found" in first or "by 0." in first
    for options in ([], ["--collect"]):
        assert finish(file, *options) == first
        for checkpoints in output.glob("*/checkpoints"):
            shutil.rmtree(checkpoints)
    again = run(file)
    assert again.stdout == first and steps(output) == trained and "training" not in again.stderr
    (output / "base-seed-42" / "metrics.jsonl").unlink()
    collected = finish(file, "--collect")
    assert "sweep.md: not replaced, because it has results of runs that no longer exist: base-seed-42" in collected
    assert results(output) == first_results
    record = json.loads((output / "sweep.json").read_text())
    for variant in record["variants"]:
        del variant["stopped_at"]  # as in the record of an earlier version
    record["variants"][1]["losses"] = {}
    (output / "sweep.json").write_text(json.dumps(record))
    assert "sweep.md: not replaced, because it has results of runs that no longer exist" in finish(file, "--collect")


def test_the_next_call_continues_a_killed_calls_job(make_sweep: MakeSweep) -> None:
    file = make_sweep(set=LONG, seeds=1)
    base = file.with_suffix("") / "base-seed-42"
    kill(start_until(file, 2, "--at-once", 1), with_jobs=False)
    launch.wait_until(lambda: not is_locked(base))
    stopped = [record for record in read_metrics(base) if record.get("event") == "stopped"]
    assert [record["reason"] for record in stopped] == ["signal"]
    saved = read_progress(base).steps
    assert saved >= 2
    process = start_until(file, steps(base.parent) + 2, "--at-once", 1)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(launch.TIMEOUT_SECONDS) and process.returncode == 75
    starts = [record["step"] for record in read_metrics(base) if record.get("event") == "start"]
    assert starts == [0, saved]


@pytest.mark.parametrize(("number", "status"), [*slow((signal.SIGINT, 130)), (signal.SIGTERM, 75)])
def test_a_signal_stops_all_runs_with_checkpoints(make_sweep: MakeSweep, number: int, status: int) -> None:
    file = make_sweep(set=LONG, seeds=1)
    output, names = file.with_suffix(""), ("base-seed-42", "learning_rate=0.05-seed-42")
    process = start_until(file, 3, "--at-once", 2)
    launch.wait_until(lambda: all(steps(output, name) >= 3 for name in names), process)
    if number == signal.SIGTERM:
        second = run(file)
        assert second.returncode == 1 and "another experiment.py is using this directory" in second.stderr
    process.send_signal(number)
    stdout, stderr = process.communicate(launch.TIMEOUT_SECONDS)
    assert process.returncode == status, stdout + stderr
    for name in names:
        assert not is_locked(output / name) and (output / name / "checkpoints" / "latest").exists()
    if number == signal.SIGTERM:
        assert "stopped by SIGTERM: 0 of 2 runs are done; unfinished: base-seed-42 (at step" in stdout
        assert "no verdict yet" in stdout


@pytest.mark.slow
def test_a_budget_is_never_exceeded(make_sweep: MakeSweep) -> None:
    file = make_sweep(set=LONG)
    hours = 26 / 3600
    budget = ("--max-usd", 2 * hours, "--price-per-hour", 2.0, "--at-once", 2)
    kill(start_until(file, 3, *budget), with_jobs=False)  # the call's jobs survive, and save a checkpoint
    ended = run(file, *budget)
    assert ended.returncode == 75, ended.stdout + ended.stderr
    reason = r"\d s of the budget are left, but a job needs 18 s: 0 of 4 runs are done; "
    assert re.search(reason + r"unfinished: base-seed-42 \(at step", ended.stdout)
    assert "learning_rate=0.05-seed-43 (not started)" in ended.stdout
    assert "$0.01 of $0.01 spent; to continue, run the same command with a larger budget" in ended.stdout
    assert (file.with_suffix("") / "base-seed-42" / "checkpoints" / "latest").exists()
    assert run(file, *budget).returncode == 75  # the call starts no job


def test_failures_stop_a_sweep_divergence_does_not(
    make_sweep: MakeSweep,
) -> None:
    levers = {"wild": {"train.learning_rate": 1e30, "train.clipping_max_norm": None}}
    file = make_sweep(levers=levers, set={"train.warmup_period_percent": 0}, seeds=1)
    metrics = file.with_suffix("") / "base-seed-42" / "metrics.jsonl"
    finish(file, "--print-commands")
    metrics.mkdir()
    failed = run(file)
    assert failed.returncode == 1 and "metrics.jsonl" in failed.stderr
    metrics.rmdir()
    assert "diverged in 1 of 1 seeds" in finish(file)


@pytest.mark.slow
def test_printed_commands_give_the_same_table(make_sweep: MakeSweep) -> None:
    file = make_sweep(seeds=1)
    trained_here, trained_by_hand = file.with_name("one"), file.with_name("two")
    finish(file, "--output", trained_here)
    printed = finish(file, "--output", trained_by_hand, "--print-commands").splitlines()
    assert len(printed) == 2
    assert "0/1" in finish(file, "--output", trained_by_hand, "--collect")
    for line in printed:
        python, *rest = shlex.split(line)
        assert python == "python"
        subprocess.run([sys.executable, *rest], cwd=ROOT, check=True, capture_output=True)
    assert "no verdict: one seed" in finish(file, "--output", trained_by_hand, "--collect")
    assert results(trained_here) == results(trained_by_hand)


@pytest.mark.slow
def test_halving_only_stops_losers(make_sweep: MakeSweep) -> None:
    levers = {"train.learning_rate": [0.01, 0.02, 1e-6, 2e-6]}
    file = make_sweep(levers=levers, halving={"factor": 3, "rungs": [0.375]}, set=SHORT)
    output, without_rule = file.with_suffix(""), file.with_name("without-rule")
    kill(start_until(file, 60), with_jobs=True)
    shown = finish(file)
    assert shown.count("stopped at step 15 by the rule") == 2
    assert "after 38% of the steps, the best 1/3 of the variants continue" in shown
    keys = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in keys.items() if key != "halving"}))
    finish(file, "--output", without_rule)
    halved, full = (read_json(directory / "sweep.json")["variants"] for directory in (output, without_rule))
    assert [variant["losses"] for variant in halved[:2]] == [variant["losses"] for variant in full[:2]]
    assert [variant["stopped_at"] for variant in halved].count(15) == 2


@pytest.mark.slow
def test_a_failed_ladder_removes_the_old_forecast(make_ladder: MakeLadder, make_run: MakeRun) -> None:
    target = make_run("target", validation_interval=100, learning_rate=0.01)
    (target / "forecast.json").write_text('{"recipe": {}}')
    file = make_ladder(target=target, rates=[1e-9, 2e-9, 4e-9])
    file.with_suffix("").mkdir()
    (earlier := file.with_suffix("") / "ladder.json").write_text('{"held_out": {}}')
    refused = run(file, "--max-hours", "0.2")
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "no forecast: the best rate for" in refused.stderr
    assert not (target / "forecast.json").exists() and not earlier.exists()


def test_results_that_cannot_be_written_are_printed(make_sweep: MakeSweep) -> None:
    file = make_sweep()
    content = file.read_bytes()
    absent, conflicting = run(file, "--collect"), run(file, "--output", file.parent)
    assert (
        absent.returncode == conflicting.returncode == 1 and "no such directory; train the sweep first" in absent.stderr
    )
    assert "sweep.json: is not a result of experiment.py sweep, so it was not overwritten" in conflicting.stderr
    assert file.read_bytes() == content
    (file.with_suffix("") / "sweep.md").mkdir(parents=True)
    shown = run(file, "--collect")
    assert shown.returncode == 1 and "sweep.md: cannot be written" in shown.stderr
    assert "Missing: base-seed-42, base-seed-43, " in shown.stdout


def test_a_dry_run_writes_nothing(make_sweep: MakeSweep, make_ladder: MakeLadder) -> None:
    file, ladder = make_sweep(seeds=3, set={"train.dataset": "/nope"}), make_ladder()
    dry = run(file, "--dry-run", "--at-once", "3", "--ranks", "2", "--max-hours", "5")
    shown = dry.stdout
    assert (
        "at most 3 at a time, each with 2 ranks, on the CPU of this machine\nstops before the total of all calls"
        in shown
    )
    assert "for this experiment exceeds 5 hours" in shown
    assert "2 variants x 3 seeds: 6 runs, 12,288 tokens" in shown
    assert "3 seeds find a difference of 5.5 seed deviations" in shown and "5 seeds find a difference of 3" in shown
    assert "WARNING: " in dry.stderr and "/nope is not a directory here" in dry.stderr
    refused = run(file)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert "/nope is not a directory here; prepare it with" in refused.stderr and "--token-files" not in refused.stderr
    shown = finish(ladder, "--dry-run", "--best-for", "100")
    assert "then the best size for $100.00 on each machine" in shown
    assert "1x8-rate-0.005: N 2,824," in shown and "x the target's" in shown
    assert not file.with_suffix("").exists() and not ladder.with_suffix("").exists()
