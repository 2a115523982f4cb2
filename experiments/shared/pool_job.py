"""Record of a training job in the account of an experiment: enough to know its process again after a kill.

Each job has a token of its own in its environment, which its ranks inherit: a job that the user starts for the same run
by hand has none, and is neither stopped nor paid for by the experiment.
"""

import calendar
import secrets
import time
from contextlib import suppress
from pathlib import Path

import attrs

from experiments.shared.run_progress import lock_holder
from training.supervision.run_lock import lock_is_held
from training.telemetry.metrics_log import read_lines

JOB_VARIABLE = "LOCKSTEP_EXPERIMENT_JOB"
START_UP_SECONDS = 3600.0  # longest from a job's start to its first record: later ones are of another job


@attrs.frozen(kw_only=True)
class PoolJob:
    """A job as the account holds it."""

    devices: list[str]  # numbers of GPUs, or of places on a CPU
    began: float  # Unix time
    seconds: float | None = None  # it ends before so many, by its --max-hours
    token: str = attrs.field(factory=lambda: secrets.token_hex(8))

    def process(self, directory: Path) -> int | None:
        """Return the process of this job that holds the run lock; None for another job's, or an unknown one."""
        holder = lock_holder(directory)
        if holder is not None:
            with suppress(OSError):  # it has ended
                if f"{JOB_VARIABLE}={self.token}".encode() in Path(f"/proc/{holder}/environ").read_bytes().split(b"\0"):
                    return holder
        return None

    def lives(self, directory: Path) -> bool:
        """Tell whether it still trains, or something does of which the system does not tell (/proc) what."""
        if not lock_is_held(directory):
            return False
        return lock_holder(directory) is None or self.process(directory) is not None

    def last_written(self, directory: Path) -> float:
        """Return when it last wrote to the metrics, by the times in them, Unix time; when it began, where it did not.

        Lines between two events have no time, but the elapsed time of the run: at most so much after the start.
        """
        last, started, before, elapsed = self.began, None, 0.0, 0.0
        for line in read_lines(directory):
            at = _unix_time(line.get("time"))
            if line.get("event") == "start":
                if started is not None:
                    break  # another job's
                if at is not None and -1 <= at - self.began <= START_UP_SECONDS:
                    started, before = at, elapsed
            elapsed = max(elapsed, line.get("elapsed_seconds", 0.0))
            if started is not None:
                last = max(last, at or 0.0, started + elapsed - before)
        return last if self.seconds is None else min(last, self.began + self.seconds)


def _unix_time(text: object) -> float | None:
    """Return the seconds of a timestamp as `common.clock.utc_now` writes it."""
    with suppress(ValueError, TypeError):
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))  # type: ignore[arg-type]
    return None
