"""Reporter: metrics records, log lines, progress bar and chart of a training run.

Rank 0 has a `Reporter`, the other ranks a `SilentReporter` with the same methods.
"""

import math
import sys
from collections.abc import Iterable
from typing import Any

import attrs
import torch
from tqdm import tqdm

from common.clock import utc_now
from common.errors import printable
from training.config.batch_plan import Plan
from training.hardware.environment import peak_memory_bytes
from training.parallel.process_group import Ranks
from training.spike_guard import Guard
from training.step import StepResult
from training.telemetry.chart import ChartProcess
from training.telemetry.progress_bar import ProgressBar, Status
from training.telemetry.time_ledger import Remaining, TimeLedger
from training.telemetry.trackers import Tracker


def print_lines(ranks: Ranks, lines: Iterable[str]) -> None:
    """Print lines on rank 0, warnings to stderr."""
    if ranks.coordinates:
        for line in lines:
            print(printable(line), file=sys.stderr if line.startswith("WARNING") else sys.stdout, flush=True)


class SpeedMeter:
    """Tokens per second and MFU of the whole job between two readings."""

    def __init__(self, ledger: TimeLedger, tokens_per_step: int, flops_per_token: int, peak_flops: float | None):
        """`peak_flops`: of all GPUs, dense bf16; None where a GPU is unknown."""
        self._ledger = ledger
        self._tokens_per_step = tokens_per_step
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._steps, self._seconds = 0, 0.0  # of this process, at the last reading

    def read(self, steps: int) -> tuple[float, float | None]:
        """Return both since the last reading, after so many steps of this process."""
        seconds = self._ledger.training_seconds()
        tokens_per_second = (steps - self._steps) * self._tokens_per_step / (seconds - self._seconds)
        self._steps, self._seconds = steps, seconds
        if self._peak_flops is None:
            return tokens_per_second, None
        return tokens_per_second, self._flops_per_token * tokens_per_second / self._peak_flops


@attrs.define(kw_only=True)
class Reporter:
    """Reporter of rank 0."""

    plan: Plan
    first_step: int  # updates done before this job
    device: torch.device
    ledger: TimeLedger
    meter: SpeedMeter
    bar: ProgressBar
    trackers: list[Tracker]
    chart: ChartProcess
    last_loss: float = math.nan  # of the last logged step

    def record(self, step: int, **values: Any) -> None:
        """Hand a record to every tracker."""
        self._write({"step": step, **values})

    def event(self, step: int, event: str, **details: Any) -> None:
        """Record an event. Redraw the chart after a checkpoint; show a failed one beside the bar until the next."""
        self._write({"event": event, "step": step, **details, "time": utc_now()})
        if event == "checkpoint":
            self.bar.warn(None)
            self.chart.redraw()
        elif event == "checkpoint-failed":
            self.bar.warn(f"step {step:,} NOT SAVED")

    def say(self, line: str) -> None:
        """Print a line above the progress bar."""
        self.bar.say(line)

    def say_on_machine(self, line: str) -> None:
        """Print a line that concerns this machine, on any rank."""
        self.bar.say(line)

    def step_done(self) -> None:
        """Advance the progress bar."""
        self.bar.advance()

    def log(self, step: int, result: StepResult, guard: Guard, remaining: Remaining) -> None:
        """Record and show a step. Waits for the GPU, the only wait of a logged step."""
        self.last_loss, grad_norm = result.loss.item(), result.grad_norm.item()
        tokens_per_second, mfu = self.meter.read(step - self.first_step)
        self.record(
            step,
            train_loss=self.last_loss,
            learning_rate=result.learning_rate,
            epochs=[read["epochs"] for read in self.plan.read_until(step)],
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,  # fp16 overflowed: the step was skipped
            tokens_per_second=round(tokens_per_second, 1),
            mfu=mfu,
            peak_memory_bytes=peak_memory_bytes(self.device),
            elapsed_seconds=round(self.ledger.elapsed_seconds(), 3),
            **guard.metrics(),
        )
        remaining_seconds = self.ledger.remaining_seconds(remaining)
        self.bar.show(
            Status(
                step=step,
                loss=self.last_loss,
                tokens_per_second=tokens_per_second,
                mfu=mfu,
                remaining_seconds=remaining_seconds,
                spent_usd=self.ledger.usd(),
                remaining_usd=None if remaining_seconds is None else self.ledger.price_of(remaining_seconds),
            )
        )

    def finish(self) -> bool:
        """Close the bar and draw the final chart; return whether it is drawn."""
        self.bar.close()
        return self.chart.finish()

    def close(self) -> None:
        """Close the bar and the trackers."""
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()

    def _write(self, record: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.write(record)


class SilentReporter:
    """Reporter of the other ranks: records nothing, prints what concerns its machine, never waits for the GPU."""

    last_loss = math.nan

    def record(self, step: int, **values: Any) -> None: ...

    def event(self, step: int, event: str, **details: Any) -> None: ...

    def say(self, line: str) -> None: ...

    def say_on_machine(self, line: str) -> None:
        tqdm.write(printable(line), file=sys.stderr)

    def step_done(self) -> None: ...

    def log(self, step: int, result: StepResult, guard: Guard, remaining: Remaining) -> None: ...

    def finish(self) -> bool:
        return False

    def close(self) -> None: ...


AnyReporter = Reporter | SilentReporter
