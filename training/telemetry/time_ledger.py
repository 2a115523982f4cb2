"""Time and cost accounting: wall-clock time by part, cost, and an estimate of the remaining time."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from common.text import dollars, printable, time_cost
from training.telemetry.metrics_log import Metric, priced_seconds, read_counted

PARTS = ("start-up", "data", "compile", "training", "validation", "checkpoints", "idle")
RECENT_STEPS = 100
LOST_TIME = "lost"  # the time of jobs that were killed before they recorded their ledger; it is not in PARTS


@attrs.frozen(kw_only=True)
class Remaining:
    steps: int
    validations: int
    checkpoints: int


@attrs.frozen(kw_only=True)
class Spent:
    """Wall-clock time and cost of earlier jobs or calls, including work that was lost when a process was killed."""

    seconds: float = 0.0
    usd: float = 0.0  # each job is charged at its own price
    unpriced_seconds: float = 0.0  # time of jobs without a price; `usd` does not include the cost of this time

    def plus(self, seconds: float, price_per_hour: float | None) -> "Spent":
        """Return the totals after adding some time and its cost."""
        cost = time_cost(seconds, price_per_hour)
        return Spent(
            seconds=self.seconds + seconds,
            usd=self.usd + (cost or 0.0),
            unpriced_seconds=self.unpriced_seconds + (seconds if cost is None else 0.0),
        )


@attrs.frozen(kw_only=True)
class Earlier(Spent):
    """Time and cost of the earlier jobs of a run."""

    parts: dict[str, float] = attrs.field(factory=dict)  # seconds by part, which add up to `seconds`
    compile_seconds: float = 0.0  # compile time of the last job


class Spending:
    """Wall-clock time and cost so far, of this process and of the processes before it."""

    def __init__(self, began: float, price_per_hour: float | None, earlier: Spent):
        self.price_per_hour = price_per_hour  # USD
        self._began = began  # a value of time.perf_counter()
        self.earlier = earlier

    def process_seconds(self) -> float:
        return time.perf_counter() - self._began

    def elapsed_seconds(self) -> float:
        return self.earlier.seconds + self.process_seconds()

    def usd(self) -> float | None:
        """Return the cost, or None without a price. Earlier time without a price is charged at the present price."""
        usd = time_cost(self.earlier.unpriced_seconds + self.process_seconds(), self.price_per_hour)
        return None if usd is None else self.earlier.usd + usd


class TimeLedger(Spending):
    """The seconds of this process, by part. Each moment belongs to exactly one part, so parts add up to the total."""

    earlier: Earlier

    def __init__(self, began: float, price_per_hour: float | None = None) -> None:
        super().__init__(began, price_per_hour, Earlier())  # `earlier` is set once the run's metrics have been read
        self._part = "start-up"
        self._since = began
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._counts = dict.fromkeys(PARTS, 0)
        # Seconds of training, and how many of them were spent waiting for data. The first step, which is not typical,
        # is also recorded separately.
        self._first_step = self._all_steps = 0.0, 0.0
        # Seconds of recent steps, not counting waits for data or the first step
        self._recent_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self.steps = 0  # steps of this process so far
        self._last_read = 0, 0.0  # steps and training seconds at the last call of steps_per_second

    @contextmanager
    def measure(self, part: str, *, counts: bool = True) -> Iterator[None]:
        """Attribute the time inside this context to a part.

        The context counts as one more validation or checkpoint, unless `counts` is false.
        """
        outer = self._switch_to(part)
        try:
            yield
        finally:
            self._switch_to(outer)
        self._counts[part] += counts

    @contextmanager
    def start_up(self) -> Iterator[None]:
        """Attribute all time from the start of the process until the end of this context to "start-up"."""
        yield
        self._switch_to("idle")

    def after_step(self, waited_for_data_seconds: float) -> None:
        """Count a step. `waited_for_data_seconds` is the total waiting time of this process so far."""
        (seconds, waited), self._all_steps = self._all_steps, (self.training_seconds(), waited_for_data_seconds)
        self.steps += 1
        if self.steps == 1:
            self._first_step = self._all_steps
        else:
            self._recent_seconds.append(self._all_steps[0] - seconds - (self._all_steps[1] - waited))

    def longest_step_seconds(self) -> float:
        """Return the seconds of the longest recent step, without waits for data.

        Before the first step, this is the compile time of the last job.
        """
        return max(self._recent_seconds, default=self.earlier.compile_seconds if self.steps == 0 else 0.0)

    def steps_per_second(self) -> float:
        """Return the training speed since the last call."""
        (steps, seconds), self._last_read = self._last_read, (self.steps, self.training_seconds())
        return (self._last_read[0] - steps) / (self._last_read[1] - seconds)

    def training_seconds(self) -> float:
        """Return the seconds that this process has spent on steps, including waits for data."""
        running = time.perf_counter() - self._since if self._part == "training" else 0.0
        return self._seconds["training"] + running

    def remaining_seconds(self, remaining: Remaining) -> float | None:
        """Return the expected seconds until the run ends, including validations and saves.

        Returns None until two steps are done.
        """
        if self.steps < 2:
            return None
        total = remaining.steps * self._typical_step_seconds()
        total += remaining.validations * self.typical_seconds("validation")
        return total + remaining.checkpoints * self.typical_seconds("checkpoints")

    def typical_seconds(self, part: str) -> float:
        """Return the average seconds that a validation or checkpoint of this process has taken; 0 before the first."""
        return self._seconds[part] / self._counts[part] if self._counts[part] else 0.0

    def record(self, waited_for_data_seconds: float) -> dict[str, Any]:
        """Return the times of this process and of the run, as a record for the metrics. `read_earlier` reads it."""
        self._switch_to(self._part)
        parts = dict(self._seconds)
        parts["data"] += waited_for_data_seconds
        parts["training"] -= waited_for_data_seconds
        if self.steps > 1:  # the first step takes longer than a typical step; the difference is compile time
            seconds, waited = self._first_step
            extra = max(0.0, seconds - waited - self._typical_step_seconds())
            parts["compile"] = min(extra, parts["training"])
            parts["training"] -= parts["compile"]
        names = dict.fromkeys((*PARTS, *self.earlier.parts))
        run = {name: parts.get(name, 0.0) + self.earlier.parts.get(name, 0.0) for name in names}
        usd = self.usd()
        return {
            Metric.LEDGER: {name: round(seconds, 4) for name, seconds in parts.items()},
            Metric.RUN_LEDGER: {name: round(seconds, 4) for name, seconds in run.items()},
            Metric.ELAPSED_SECONDS: round(self.earlier.seconds + sum(parts.values()), 4),
            Metric.USD: None if usd is None else round(usd, 4),
        }

    def _typical_step_seconds(self) -> float:
        return (self.training_seconds() - self._first_step[0]) / (self.steps - 1)

    def _switch_to(self, part: str) -> str:
        """Attribute the time from now on to a part; return the previous part."""
        now = time.perf_counter()
        self._seconds[self._part] += now - self._since
        self._since = now
        before, self._part = self._part, part
        return before


def read_earlier(run_directory: Path, checkpoint_seconds: float) -> Earlier:
    """Return the time and cost of earlier jobs from `metrics.jsonl`.

    `checkpoint_seconds` is the elapsed time recorded in the checkpoint. It is used if the metrics show less time.
    """
    reached, spent = 0.0, Spent()
    lines = read_counted(run_directory).records
    for elapsed, price in priced_seconds(lines, None):
        spent, reached = spent.plus(elapsed - reached, price), elapsed
    seconds = max(reached, checkpoint_seconds)
    ledger = next((line for line in reversed(lines) if Metric.RUN_LEDGER in line), None)
    parts: dict[str, float] = {}
    recorded_seconds = 0.0
    if ledger is not None:
        parts, recorded_seconds = dict(ledger[Metric.RUN_LEDGER]), ledger[Metric.ELAPSED_SECONDS]
    parts[LOST_TIME] = parts.get(LOST_TIME, 0.0) + (seconds - recorded_seconds)
    return Earlier(
        seconds=seconds,
        parts={name: part_seconds for name, part_seconds in parts.items() if part_seconds > 0},
        usd=spent.usd,
        unpriced_seconds=spent.unpriced_seconds + (seconds - reached),
        compile_seconds=0.0 if ledger is None else ledger.get(Metric.LEDGER, ledger[Metric.RUN_LEDGER])["compile"],
    )


def table(record: dict[str, Any]) -> list[str]:
    """Return a table of the time per part, as lines: for this job and, if the run had other jobs, for the whole run.

    The last line is the cost, if it is known.
    """
    columns = {"this job": record[Metric.LEDGER]}
    if sum(record[Metric.RUN_LEDGER].values()) > sum(record[Metric.LEDGER].values()) + 0.01:
        columns["the run"] = record[Metric.RUN_LEDGER]
    lines = ["time        " + "".join(f"{name:>20}" for name in columns)]
    for part in [*record[Metric.RUN_LEDGER], "in all"]:
        line = f"{printable(part):<12}"
        for parts in columns.values():
            total = sum(parts.values())
            seconds = total if part == "in all" else parts.get(part, 0.0)
            line += f"{seconds:>12,.1f} s{seconds / total:>6.0%}"
        lines.append(line)
    if record[Metric.USD] is not None:
        lines.append(f"cost: {dollars(record[Metric.USD])} for the run so far")
    return lines
