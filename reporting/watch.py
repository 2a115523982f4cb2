"""Watch of runs: a report is written again as their metrics and checkpoints grow, until no job trains them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from reporting.run_history import NotBegun
from training.checkpoints.directory import checkpoints_of, steps_in
from training.supervision.exit_record import EXIT_FILE
from training.supervision.run_lock import is_locked
from training.telemetry.metrics_log import EVALUATIONS, METRICS

IDLE_LOOKS = 2  # in succession without a job: torchrun may be restarting one


def watch(runs: Sequence[Path], write: Callable[[], None], every_seconds: float) -> None:
    """Call `write`, and again whenever the runs have changed, until no job trains any of them.

    A run that has not measured anything is waited for while its job lives; without one, what `write` raises is raised.
    """
    seen, idle = None, 0
    while True:
        idle = 0 if any(map(is_locked, runs)) else idle + 1  # before the look: what a job writes last is seen
        now = [_version(run) for run in runs]
        if now != seen:
            try:
                write()
            except NotBegun:
                if idle >= IDLE_LOOKS:
                    raise
            else:
                seen = now
        if idle >= IDLE_LOOKS:
            return
        time.sleep(every_seconds)


def _version(run: Path) -> list[object]:
    """Return what changes when a run has something new to report."""
    return [*(_size(run / name) for name in (METRICS, EVALUATIONS, EXIT_FILE)), *steps_in(checkpoints_of(run))]


def _size(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns
