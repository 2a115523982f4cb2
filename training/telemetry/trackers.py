"""Experiment trackers: consumers of every metrics record. To add one, write a class with these members and list it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from training.telemetry.metrics_log import MetricsLog

Say = Callable[[str], None]  # prints a line beside the progress bar


class Tracker(Protocol):
    """A consumer of metrics records, on rank 0. One that raises is left out from then on; the run goes on."""

    files: ClassVar[tuple[str, ...]]  # its files in the run directory: `--resume never` archives them

    @classmethod
    def open(cls, directory: Path, config: dict[str, Any], say: Say) -> "Tracker | None":
        """Open it with the resolved configuration of the run (`resolved.json`); None where it is switched off.

        A service needs a switch, such as an environment variable: `if "WANDB_PROJECT" not in os.environ: return None`.
        """

    def write(self, record: dict[str, Any]) -> None:
        """Take one record of `metrics.jsonl`, on the training thread: return at once.

        A record with the event "start" at step N supersedes the records of earlier jobs beyond N.
        """

    def close(self) -> None:
        """Take no more records."""


TRACKERS: tuple[type[Tracker], ...] = (MetricsLog,)


def open_trackers(directory: Path, config: dict[str, Any], say: Say) -> list[Tracker]:
    """Open the trackers that are switched on. Raises BadInput where the metrics log cannot be opened."""
    opened = [kind.open(directory, config, say) for kind in TRACKERS]
    return [tracker for tracker in opened if tracker is not None]
