"""Replays send a run to a tracker, which then has each row once, even after interruptions and repeated steps."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import BadInput
from reporting.run_history import NotBegun
from reporting.trackers import tracker_sync as module
from reporting.trackers.tracker_sync import tracked_rows
from tests import launch
from tests.conftest import ROOT
from tests.reporting.trackers.tracked import (
    Values,
    append_steps,
    assert_holds_losses,
    from_tensorboard,
    from_trackio,
    killed_replay,
    replay,
)
from training.supervision.run_lock import take_run_lock
from training.telemetry.metrics_log import METRICS, current_records, read_counted

Tracker = tuple[str, Callable[[], Values]]
ODD = (
    {"event": "start", "step": 3, "time": "\ud800", "elapsed_seconds": 5.0},
    {"step": 4, "train_loss": 9.0, "tokens_per_second": 10**400, "mfu": True},
    {"step": 4, "train_loss": 2.0, "epochs": ["x", 10**400, 1e308]},
    {"step": 4, "validation_loss": 2.0, "validation_losses": {"\udcff": 3.0}},
    {"event": "stopped", "step": 4, "reason": "\ud83d"},
)


@pytest.fixture(params=["tensorboard", "trackio"])
def tracker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """The name of a tracker, and a function that reads back the run in tmp_path / "run"."""
    pytest.importorskip(request.param)
    monkeypatch.setattr(module, "ROWS", 10)
    if request.param == "tensorboard":
        return "tensorboard", lambda: from_tensorboard(tmp_path / "run")
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    return "trackio", lambda: from_trackio(tmp_path / "trackio" / "tests.db")


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_killed_replay_is_completed_without_duplicates(tracker: Tracker, tmp_path: Path, after: bool) -> None:
    name, read = tracker
    kills = 0
    for call in range(100):
        run = tmp_path / "run"
        for path in sorted(run.rglob("*"), reverse=True) if run.exists() else ():
            path.rmdir() if path.is_dir() else path.unlink()
        append_steps(run, 1, 25)
        if not killed_replay(run, name, call, after=after):
            break
        kills += 1
        append_steps(run, 26, 35, job=1)  # the run has grown in the meantime
        assert not killed_replay(run, name, None, after=after)
        assert_holds_losses(read(), run)
    # The replay was killed at each call that writes the state file, discards data, appends (three times) or closes.
    assert kills >= 9


@pytest.mark.slow
def test_repeated_steps_have_the_new_values(tracker: Tracker, tmp_path: Path) -> None:
    name, read = tracker
    append_steps(tmp_path / "run", 1, 25)
    assert replay(tmp_path / "run", name) == (25, 25)
    assert replay(tmp_path / "run", name) == (0, 25)
    append_steps(tmp_path / "run", 11, 20, loss=3.0, job=1)
    assert replay(tmp_path / "run", name) == (20, 20)
    assert_holds_losses(read(), tmp_path / "run")
    append_steps(tmp_path / "run", 21, 40, loss=3.0, job=2)
    replay(tmp_path / "run", name)
    assert_holds_losses(read(), tmp_path / "run")
    assert max(read()["train_loss"]) == 40


@pytest.mark.slow
def test_the_newest_step_waits_while_a_job_trains(tracker: Tracker, tmp_path: Path) -> None:
    name, read = tracker
    append_steps(tmp_path / "run", 1, 12)
    job = take_run_lock(tmp_path / "run")
    assert job.file is not None
    assert replay(tmp_path / "run", name) == (11, 11) and 12 not in read()["train_loss"]
    job.file.close()
    assert replay(tmp_path / "run", name) == (1, 12)
    values = read()
    assert_holds_losses(values, tmp_path / "run")
    assert values["learning_rate"][7] == 1e-3 / 3 and values["epochs"][5] == 5 / 7
    assert values["peak_memory_bytes"][12] == 123_456_789_013
    assert 3 not in values["grad_norm"] and values["grad_norm"][4] == 4 / 3 and "mfu" not in values
    assert values["validation_loss/x"] == {10: 2 / 3}
    assert values["dollars"][10] == pytest.approx(11 * 3.6 / 3600)


def test_a_missing_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such run directory"):
        module.TrackerSync(tmp_path / "absent", "tensorboard", "tests")


def test_new_runs_and_second_replays_are_errors(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard"), pytest.importorskip("trackio")
    waiting = module.TrackerSync(tmp_path, "tensorboard", "tests")
    with pytest.raises(NotBegun, match="the run has not begun"):  # after this error, --watch waits until the run begins
        waiting.advance()
    waiting.close()
    append_steps(tmp_path, 1, 2)
    first = module.TrackerSync(tmp_path, "tensorboard", "tests")
    with pytest.raises(BadInput, match=r"another report\.py --to tensorboard is sending this run"):
        module.TrackerSync(tmp_path, "tensorboard", "tests")
    first.close()
    os.mkfifo(tmp_path / ".tracker-trackio.lock")
    with pytest.raises(BadInput, match=r"\.lock: cannot be written: is a pipe"):
        module.TrackerSync(tmp_path, "trackio", "tests")


@pytest.mark.slow
def test_rerunning_completes_a_replay_after_a_full_disk(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    append_steps(run, 1, 40)
    full = launch.run(ROOT / "report.py", str(run), "--to", "tensorboard", file_bytes=8000)
    assert full.returncode == 1 and full.stderr.count("\n") == 1 and "make room" in full.stderr
    assert launch.run(ROOT / "report.py", str(run), "--to", "tensorboard").returncode == 0
    assert_holds_losses(from_tensorboard(run), run)


def test_event_files_of_the_user_are_not_touched(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    append_steps(run, 1, 5)
    (run / "tensorboard").mkdir()
    user_files = [f"events.out.tfevents.{name}" for name in ("1764000000.host.123.0", "1764000000000000000.v0", "9.v1")]
    for name in user_files:
        (run / "tensorboard" / name).write_bytes(name.encode())
    replay(run, "tensorboard")
    append_steps(run, 3, 5, loss=3.0, job=1)
    assert replay(run, "tensorboard") == (5, 5)
    files = {path.name: path for path in (run / "tensorboard").iterdir()}
    assert {name: files.pop(name).read_bytes().decode() for name in user_files} == {name: name for name in user_files}
    assert len(files) == 1


def test_huge_numbers_are_dropped_and_bad_text_escaped(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in ODD))
    lines = read_counted(tmp_path).records
    [row] = tracked_rows(lines, current_records(lines))
    expected = {"train_loss": 2.0, "validation_loss": 2.0, "validation_loss/\\udcff": 3.0}
    assert row.values == expected and row.events[-1] == "step 4: stopped: \\ud83d"
