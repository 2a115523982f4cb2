"""Trackers: which are opened, and their files in the run directory."""

from pathlib import Path
from typing import Any

import pytest

from training.checkpoints.archive import RESULTS
from training.telemetry import trackers
from training.telemetry.metrics_log import METRICS, MetricsLog


class SwitchedOff:
    """A tracker whose switch is off."""

    files = ("service.json",)
    seen: list[Any] = []  # noqa: RUF012  # of the one test

    @classmethod
    def open(cls, directory: Path, config: dict[str, Any], _: Any) -> None:
        cls.seen.append((directory, config))


def test_the_metrics_log_is_always_open_and_others_by_their_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "TRACKERS", (MetricsLog, SwitchedOff))
    [log] = trackers.open_trackers(tmp_path, {"steps": 8}, print)
    log.close()
    assert isinstance(log, MetricsLog) and (tmp_path / METRICS).exists()
    assert SwitchedOff.seen == [(tmp_path, {"steps": 8})]


def test_files_of_trackers_are_archived_with_a_run() -> None:
    assert {file for kind in trackers.TRACKERS for file in kind.files} <= set(RESULTS)
