"""Experiment trackers: consumers of every metrics record. To add one, write a class with these methods and list it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from training.telemetry.metrics_log import MetricsLog


class Tracker(Protocol):
    """A consumer of metrics records, on rank 0."""

    def write(self, record: dict[str, Any]) -> None:
        """Take one record, as in `metrics.jsonl`. Raises nothing: tracking must not end a run."""

    def close(self) -> None:
        """Take no more records."""


def open_trackers(run_directory: Path, say: Callable[[str], None]) -> list[Tracker]:
    """Open the trackers of a run; `say` prints a line beside the progress bar.

    Raises BadInput where the metrics log cannot be opened.
    """
    return [MetricsLog(run_directory, say)]
