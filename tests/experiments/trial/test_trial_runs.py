"""experiment.py trial as a process, in a repository of its own: same bits, a change, kills, a budget, refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.trial.checkout import Snapshots
from tests import launch
from tests.conftest import write_run
from tests.experiments.trial.test_checkout import git

SECONDS = 600
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]


@pytest.fixture
def project(tmp_path: Path, token_files: Path) -> Path:
    """This repository's files as they are, in a repository with one commit that has a tiny run."""
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
    """Run a trial to its end; return its exit status, its last line, and all that it has said."""
    done = subprocess.run(
        command(project, *words), cwd=project, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    return done.returncode, json.loads(last) if last.startswith("{") else {}, done.stdout + done.stderr


def change(project: Path, **train: Any) -> None:
    path = project / "runs" / "tiny" / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | train))


def test_a_refactoring_has_the_same_bits_and_no_pair_is_trained(project: Path) -> None:
    with (project / "training" / "step.py").open("a") as file:
        file.write("\n\ndef unused() -> None:\n    pass\n")
    change(project, log_interval=3)
    status, record, said = trial(project, "HEAD", ".")
    assert status == record["exit_status"] == 10 and record["verdict"] == "same bits", said
    assert record["pairs"] == 0 and record["notes"] == ["The run directories differ in train.log_interval."]
    (output,) = (project / "trials").glob("tiny-*")
    assert json.loads((output / "trial.json").read_text()) == record and not list(output.glob("*-seed-*"))


def test_a_change_is_judged_by_pairs_and_kills_and_a_budget_leave_the_same_table(project: Path) -> None:
    change(project, learning_rate=1e-6)
    (project / "requirements.txt").write_text("torch==0\n")
    words, folder = ("HEAD", ".", "--pairs", "3"), project / "trials"
    status, record, said = trial(project, *words)
    assert status == record["exit_status"] in (11, 12) and record["pairs"] == 3, said
    assert record["loss_difference"][0] > 0.1 and record["step_time_ratio"][0] > 0
    assert "requirements.txt differ" in said and record["number"] == 1
    shutil.rmtree(folder)
    for number, begun in ((signal.SIGKILL, "probes/*"), (signal.SIGTERM, "*-seed-*")):
        process = subprocess.Popen(command(project, *words), cwd=project, stdout=subprocess.DEVNULL)
        launch.wait_until(lambda begun=begun: bool(list(folder.glob(f"tiny-*/{begun}/metrics.jsonl"))))
        os.kill(process.pid, number)
        assert process.wait(SECONDS) in (-signal.SIGKILL, 75)
    status, stopped, said = trial(project, *words, "--max-hours", "0.0001")
    assert status == stopped["exit_status"] == 75 and stopped["verdict"] == "cannot tell yet", said
    again = trial(project, *words)[1]
    for key in ("step_time_ratio", "memory_ratio"):  # of this machine, at this time
        del record[key], again[key]
    assert again == record
    assert len((folder / "trials.jsonl").read_text().splitlines()) == 2


def test_what_changes_the_measured_tokens_breaks_training_or_is_no_revision_is_refused(project: Path) -> None:
    change(project, validation_sequences=8)
    status, _, said = trial(project, "HEAD", ".")
    assert status == 1 and "validation_sequences: got 8, wanted 10, as the base has it: it changes the tokens" in said
    git(project, "checkout", "-q", "runs")
    (project / "model" / "loss.py").write_text("raise RuntimeError('broken')\n")
    status, _, said = trial(project, "HEAD", ".")
    assert status == 1 and "candidate-probe: training failed: RuntimeError: broken; its output: " in said
    assert trial(project, "nowhere", ".")[0] == 1 and not (project / "trials" / "trials.jsonl").exists()
