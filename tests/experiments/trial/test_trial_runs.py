"""`experiment.py trial` as a process, in a temporary repository: same bits, a change, kills, a budget, and errors."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from experiments.trial import trial as trial_module
from experiments.trial.checkout import Snapshots
from experiments.trial.trial import Trial
from experiments.trial.trial_runs import (
    check_measured,
    describe_lengths,
    describe_same_bits,
    recorded_number,
    short_steps,
)
from tests import launch
from tests.conftest import write_run
from tests.experiments.trial.test_checkout import git

SECONDS = 600


def slow(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs trials."""
    return pytest.mark.slow(pytest.mark.timeout(2 * SECONDS)(test))


@pytest.fixture
def project(tmp_path: Path, token_files: Path) -> Path:
    """Return a repository. Its only commit has all files of this project and a tiny run.

    Uncommitted changes of this project are included.
    """
    project = tmp_path / "project"
    with Snapshots() as snapshots:
        snapshots.check_out(snapshots.tree_of("."), project)
    (project / "token_files").unlink()
    write_run(project / "runs" / "tiny", token_files, validation_interval=4)
    git(project, "init", "-q")
    git(project, "add", "--all")
    git(project, "commit", "-qm", "base")
    return project


def command(project: Path, *words: str) -> list[str]:
    return [sys.executable, str(project / "experiment.py"), "trial", *words, "runs/tiny", "--device", "cpu"]


def trial(project: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Run a trial to its end; return its exit status, its record, and its complete output."""
    done = subprocess.run(
        command(project, *words), cwd=project, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    return done.returncode, json.loads(last) if last.startswith("{") else {}, done.stdout + done.stderr


def change(project: Path, **train: Any) -> None:
    path = project / "runs" / "tiny" / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | train))


@slow
def test_a_refactoring_needs_no_pairs(project: Path) -> None:
    with (project / "training" / "step.py").open("a") as file:
        file.write("\n\ndef unused() -> None:\n    pass\n")
    change(project, log_interval=3)
    status, record, output_text = trial(project, "HEAD", ".")
    assert status == record["exit_status"] == 10 and record["verdict"] == "same bits", output_text
    assert record["pairs"] == 0 and record["notes"] == ["The run directories differ in train.log_interval."]
    assert "same bits: equal weights, moments and validation losses after the whole run of 8 steps" in output_text
    assert (record["compared_steps"], record["steps"]) == (8, 8)
    (output,) = (project / "trials").glob("tiny-*")
    assert json.loads((output / "trial.json").read_text()) == record and not list(output.glob("*-seed-*"))


@slow
def test_kills_do_not_change_the_verdict(project: Path) -> None:
    change(project, learning_rate=1e-6)
    (project / "requirements.txt").write_text("torch==0\n")
    words, folder = ("HEAD", ".", "--pairs", "3"), project / "trials"
    status, record, output = trial(project, *words)
    assert status == record["exit_status"] in (11, 12) and record["pairs"] == 3, output
    assert record["loss_difference"][0] > 0.1 and record["step_time_ratio"][0] > 0
    assert "The requirements differ (requirements.txt)" in output and record["number"] == 1
    shutil.rmtree(folder)
    for number, runs_begun in ((signal.SIGKILL, "probes/*"), (signal.SIGTERM, "*-seed-*")):
        process = subprocess.Popen(command(project, *words), cwd=project, stdout=subprocess.DEVNULL)
        launch.wait_until(lambda runs_begun=runs_begun: bool(list(folder.glob(f"tiny-*/{runs_begun}/metrics.jsonl"))))
        os.kill(process.pid, number)
        assert process.wait(SECONDS) in (-signal.SIGKILL, 75)
    status, stopped, output = trial(project, *words, "--max-hours", "0.0001")
    assert status == stopped["exit_status"] == 75 and stopped["verdict"] == "cannot tell yet", output
    again = trial(project, *words)[1]
    for key in ("step_time_ratio", "memory_ratio"):  # these vary from call to call
        del record[key], again[key]
    assert again == record
    assert len((folder / "trials.jsonl").read_text().splitlines()) == 2


@slow
def test_a_candidate_that_measures_other_tokens_is_refused(project: Path) -> None:
    keys = project / "training" / "config" / "key_groups.py"
    text = keys.read_text()
    changed = re.sub(r"(start_val_token: int = key_field\(\s*integer\(0\),\s*)0,", r"\g<1>320,", text)
    assert changed != text
    keys.write_text(changed)
    status, _, output = trial(project, "HEAD", ".")
    assert status == 1 and "candidate-probe/resolved.json: train.start_val_token: 320, but base-probe has 0: " in output
    assert not (project / "trials" / "trials.jsonl").exists()  # no pair was trained


@slow
def test_unusable_candidates_are_errors(project: Path) -> None:
    change(project, validation_sequences=8)
    status, _, output = trial(project, "HEAD", ".")
    assert status == 1 and "validation_sequences: the candidate has 8, but the base has 10; both need the" in output
    git(project, "checkout", "-q", "runs")
    (project / "model" / "loss.py").write_text("raise RuntimeError('broken')\n")
    status, _, output = trial(project, "HEAD", ".")
    assert status == 1 and "candidate-probe: training failed: RuntimeError: broken; see its output in " in output
    assert trial(project, "nowhere", ".")[0] == 1 and not (project / "trials" / "trials.jsonl").exists()


@pytest.mark.parametrize(("steps", "short"), [(1, 1), (16, 16), (17, 16), (40_000, 16)])
def test_same_bits_claims_only_compared_steps(steps: int, short: int) -> None:
    text = describe_same_bits(short_steps(steps), steps)
    assert short_steps(steps) == short and text.startswith("same bits: equal weights, moments and validation losses ")
    if short == steps:
        assert text.endswith(f" after the whole run of {steps} steps")
    else:
        assert f"in a run shortened to {short} steps; the full run has {steps:,} steps, and anything that" in text


@pytest.mark.parametrize("name", ["probe", "seed-7"])
def test_both_sides_measure_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(trial_module, "FOLDER", tmp_path)
    keys = {"base": "b" * 40, "candidate": "c" * 40}
    trial_of_runs = Trial(
        revisions=keys, trees=keys, run=Path("runs/x"), sections={side: {"train": {}} for side in keys}
    )
    for run in ("probe", "seed-7"):
        for side in keys:
            (directory := trial_of_runs.directory(side, run)).mkdir(parents=True)
            start = 320 if (side, run) == ("candidate", name) else 0
            (directory / "resolved.json").write_text(json.dumps({"train": {"start_val_token": start}}))
    if name != "probe":
        check_measured(trial_of_runs, ["probe"])
    with pytest.raises(
        BadInput, match=rf"candidate-{name}/resolved.json: train.start_val_token: 320, but base-probe has 0"
    ):
        check_measured(trial_of_runs, ["probe", "seed-7"])


def test_notes_name_other_tokens_and_another_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "FOLDER", tmp_path)
    keys = {"base": "b" * 40, "candidate": "c" * 40}
    trial_of_runs = Trial(
        revisions=keys, trees=keys, run=Path("runs/x"), sections={side: {"train": {}} for side in keys}
    )
    for side, tokens, precision in (("base", 1000, "fp32"), ("candidate", 2000, "bf16")):
        (directory := trial_of_runs.directory(side, "probe")).mkdir(parents=True)
        record = {"sources": [{"tokens": tokens}], "numerics": {"precision": precision}, "steps": 9}
        (directory / "resolved.json").write_text(json.dumps(record))
    assert list(describe_lengths(trial_of_runs, {"base": 9, "candidate": 9})) == [
        "Training tokens: base 1,000, candidate 2,000.",
        "The loss of the base is measured in fp32, and the loss of the candidate in bf16.",
    ]
    assert recorded_number(directory / "resolved.json", "steps") == 9
    for name in ("accumulation", "model.context_length", "numerics.precision"):
        with pytest.raises(BadInput, match=rf"resolved.json: {name}: got .*, expected a whole number above 0"):
            recorded_number(directory / "resolved.json", name)
