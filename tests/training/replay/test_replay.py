"""Replay: the recorded numbers of steps are read, and a table compares them with the replayed numbers."""

import json
import re
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.conftest import ROOT, MakeRun, complete, train
from training.replay import replay


def test_newest_line_of_a_step_counts(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "train_loss": 5.0, "grad_norm": 1.0, "tokens_per_second": 3},
        {"step": 2, "train_loss": 4.0, "grad_norm": 1.0},
        {"step": 2, "state_sha256": "ab"},
        {"event": "start", "step": 1, "elapsed_seconds": 1.0},
        {"step": 2, "train_loss": 4.5, "grad_norm": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recorded = replay.read_recorded(tmp_path, (1, 2), 8)
    assert recorded == {1: {"train_loss": 5.0, "grad_norm": 1.0}, 2: {"train_loss": 4.5, "grad_norm": None}}


@pytest.mark.parametrize("steps", [(0, 1), (3, 2), (8, 9)])
def test_replay_of_missing_steps_is_refused(tmp_path: Path, steps: tuple[int, int]) -> None:
    with pytest.raises(BadInput, match=rf"--replay {steps[0]} {steps[1]}: wanted two steps from 1 to 8"):
        replay.read_recorded(tmp_path, steps, 8)


def test_numbers_are_same_different_or_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    replayed: replay.Numbers = {"train_loss": 4.5, "grad_norm": None, "state_sha256": "ab"}
    assert replay._show_step(2, replayed, {"train_loss": 4.5, "grad_norm": None})
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["same", "same", "recorded"]
    assert not replay._show_step(2, replayed, {"train_loss": 4.25})
    assert capsys.readouterr().out.splitlines()[0].split() == ["2", "train_loss", "4.5", "4.25", "DIFFERENT"]


def test_replay_repeats_steps_and_writes_nothing(make_run: MakeRun) -> None:
    run = make_run(model={"drop_rate": 0.1})
    complete(run, "--hash-every", "1", "--set", "parallel=fsdp", ranks=2)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = complete(run, "--replay", "6", "7")
    assert f"replaying from {run}/checkpoints/step-00000004 at step 4; nothing is written" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[-1:] in (["same"], ["DIFFERENT"])]
    same = [(step, key, "same") for step in "67" for key in ("train_loss", "grad_norm", "state_sha256")]
    assert [(row[0], row[1], row[-1]) for row in rows] == [*same, ("compared", "with", "same")]
    assert "compared with their record: 2 of 2 steps, all of them are the same" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    changed = train(run, "--replay", "1", "2", "--set", "learning_rate=0.02")
    assert changed.returncode == 1
    assert "replaying from the start" in changed.stdout
    assert "DIFFERENT" in changed.stdout


@pytest.mark.parametrize(
    ("compared", "same", "text"),
    [
        (9, True, "compared with their record: 9 of 9 steps, all of them are the same"),
        (
            2,
            True,
            "compared with their record: 2 of 9 steps, all of them are the same; the other steps were not compared",
        ),
        (9, False, "compared with their record: 9 of 9 steps, not all of them are the same"),
        (0, False, "compared with their record: none of 9 steps"),
    ],
)
def test_replay_claims_only_compared_steps(compared: int, same: bool, text: str) -> None:
    assert replay.describe_comparison(compared, 9, same=same) == text


def test_documented_replay_compares_each_step(make_run: MakeRun) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    (steps,) = re.findall(r"--replay (\d+ \d+)", page)
    interval = json.loads((ROOT / "runs" / "quickstart" / "train.json").read_text())["log_interval"]
    run = make_run(log_interval=interval)
    complete(run)
    done = complete(run, "--replay", *steps.split())
    rows = [line.split() for line in done.stdout.splitlines() if "train_loss" in line]
    assert rows and {row[-1] for row in rows} == {"same"}
