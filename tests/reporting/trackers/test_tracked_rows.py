"""Rows for a tracker hold numbers and text only, whatever a line of metrics.jsonl holds."""

import json
from pathlib import Path

import pytest

from reporting.trackers.tracked_rows import tracked_rows
from reporting.trackers.tracker_sync import TRACKERS
from tests.reporting.trackers.tracked import append_steps, replay
from training.telemetry.metrics_log import METRICS, current_records, read_lines

ODD = (
    {"event": "start", "step": 3, "time": "\ud800", "elapsed_seconds": 5.0},
    {"step": 4, "train_loss": 9.0, "tokens_per_second": 10**400, "mfu": True},
    {"step": 4, "train_loss": 2.0, "epochs": ["x", 10**400, 1e308]},
    {"step": 4, "validation_loss": 2.0, "validation_losses": {"\udcff": 3.0}},
    {"event": "stopped", "step": 4, "reason": "\ud83d"},
)


def odd_run(directory: Path) -> Path:
    directory.mkdir()
    (directory / METRICS).write_text("".join(json.dumps(line) + "\n" for line in ODD))
    return directory


def test_numbers_too_large_are_left_out_and_text_that_is_not_unicode_is_escaped(tmp_path: Path) -> None:
    lines = read_lines(odd_run(tmp_path / "run"))
    [row] = tracked_rows(lines, current_records(lines))
    wanted = {"train_loss": 2.0, "validation_loss": 2.0, "validation_loss/\\udcff": 3.0}
    assert row.values == wanted and row.events[-1] == "step 4: stopped: \\ud83d"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_tracker_takes_them(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    if name == "trackio":
        from trackio import sqlite_storage

        monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    run = odd_run(tmp_path / "run")
    append_steps(run, 5, 8, job=1)
    assert replay(run, name) == (5, 5)
