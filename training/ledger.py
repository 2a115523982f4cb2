"""Where the wall-clock time of a run goes, and what is still to come."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

PARTS = ("start-up", "data", "compute", "validation", "checkpoint")


@attrs.frozen(kw_only=True)
class Remaining:
    """What a run still has to do."""

    steps: int
    validations: int
    checkpoints: int


class Ledger:
    """Seconds by part since this process began the run; `compute` is what no other part claims."""

    def __init__(self, began: float) -> None:
        self.earlier_seconds = 0.0  # of the processes this run was resumed from
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._counts = dict.fromkeys(PARTS, 0)
        self._began = began  # by time.perf_counter()
        self.first_step_seconds = 0.0  # compilation, buffers: not typical of later steps
        self._steps = 0

    @contextmanager
    def start_up(self) -> Iterator[None]:
        """Account everything since the process began, what runs inside included, to the start-up."""
        yield
        self.seconds["start-up"] = self.process_seconds()

    @contextmanager
    def measure(self, part: str, *, counts: bool = True) -> Iterator[None]:
        """Account what runs inside to a part; it counts as one validation or checkpoint unless told otherwise."""
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began
        self._counts[part] += counts

    def after_step(self) -> None:
        """Count a finished step; the first one's compute is kept apart from the typical ones."""
        self._steps += 1
        if self._steps == 1:
            self.first_step_seconds = self.training_seconds()

    def process_seconds(self) -> float:
        """Return the wall-clock seconds of this process."""
        return time.perf_counter() - self._began

    def elapsed_seconds(self) -> float:
        """Return the wall-clock seconds of the run, earlier processes included."""
        return self.earlier_seconds + self.process_seconds()

    def training_seconds(self) -> float:
        """Return the seconds of this process spent on steps: data and compute."""
        return self.process_seconds() - sum(self.seconds[part] for part in ("start-up", "validation", "checkpoint"))

    def remaining_seconds(self, remaining: Remaining) -> float | None:
        """Return the expected seconds to the end, validation and checkpoints included; None before the second step."""
        if self._steps < 2:
            return None
        per_step = (self.training_seconds() - self.first_step_seconds) / (self._steps - 1)
        total = remaining.steps * per_step
        for part, count in (("validation", remaining.validations), ("checkpoint", remaining.checkpoints)):
            if self._counts[part]:
                total += count * self.seconds[part] / self._counts[part]
        return total

    def breakdown(self, waited_for_data_seconds: float) -> dict[str, float]:
        """Return this process's seconds by part; they add up to the clock."""
        parts = dict(self.seconds)
        parts["data"] = waited_for_data_seconds
        parts["compute"] = self.process_seconds() - sum(parts[part] for part in PARTS if part != "compute")
        return parts
