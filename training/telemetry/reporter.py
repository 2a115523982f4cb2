"""Reporter: metrics records, progress bar and chart of a training run. Only the reporter on rank 0 is active.

This file also has the introduction and the summary that a job prints for people.
"""

import math
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from tqdm import tqdm

from common.output import Notice, advisory, newly_dropped, progress, show, warning
from common.text import dollars, duration, time_cost
from training.config.batch_plan import Plan, describe
from training.config.train_config import Run
from training.hardware.environment import peak_memory_bytes
from training.parallel.process_group import Ranks
from training.precision import Numerics
from training.state import Position
from training.step import StepResult
from training.telemetry.chart import BackgroundChart
from training.telemetry.metrics_log import Detail, EarlyEnd, Metric, MetricsLog, RunEvent, event_record
from training.telemetry.time_ledger import Remaining, TimeLedger

LINE_SECONDS = 10.0  # pause between plain lines, if stderr is not a terminal
SLOW_SHARE = 0.2  # a rank is slow if its time exceeds the median rank's time by more than this share
# For each failure event: the event that ends the failure, and the text that the bar shows until then
FAILURES = {
    RunEvent.CHECKPOINT_FAILED: (RunEvent.CHECKPOINT, "NOT SAVED"),
    RunEvent.UPLOAD_FAILED: (RunEvent.UPLOAD, "NOT UPLOADED"),
}


class ProgressBar:
    """Progress bar of a run in a terminal, or plain lines if stderr is not a terminal. Only rank 0 has one."""

    def __init__(self, first_step: int, steps: int):
        self._last_line = 0.0
        self._warnings: dict[str, str] = {}  # by topic
        tqdm.monitor_interval = 0  # otherwise tqdm starts a thread that watches its bars
        self._bar = tqdm(
            total=steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            disable=None,  # disables the bar if stderr is not a terminal
        )

    def advance(self) -> None:
        self._bar.update()

    def show(self, step: int, numbers: str) -> None:
        line = "  ".join([numbers, *self._warnings.values()])
        self._bar.set_postfix_str(line)
        if self._bar.disable and (time.monotonic() - self._last_line >= LINE_SECONDS or step == self._bar.total):
            self._last_line = time.monotonic()
            show(progress(f"step {step:,}/{self._bar.total:,}  {line}"))

    def warn(self, topic: str, warning: str | None) -> None:
        """Show a warning next to the numbers. It replaces the last warning on this topic; None removes that warning."""
        self._warnings.pop(topic, None)
        if warning is not None:
            self._warnings[topic] = warning

    def close(self) -> None:
        self._bar.close()


@attrs.define(kw_only=True)
class Reporter:
    """Reporter of one rank. A reporter without a bar records nothing and never waits for the GPU.

    A failure here is reported once and does not end the run, unless it is an error of the GPU.
    """

    plan: Plan
    device: torch.device
    ledger: TimeLedger
    peak_tokens: float | None  # tokens/s at the dense bf16 peak of all GPUs; None if the GPU is unknown
    bar: ProgressBar | None = None
    metrics: MetricsLog | None = None
    chart: BackgroundChart | None = None
    last_loss: float = math.nan  # loss of the last logged step
    _step: int = attrs.field(init=False, default=0)  # step of the last record

    @advisory("metrics")
    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Record measured values. The keys of `values` are names in `Metric`."""
        self._write({"step": step, **values})

    @advisory("events")
    def event(self, step: int, event: str, **details: Any) -> None:
        """Record an event. After a checkpoint, the chart is drawn again.

        A failure, such as a failed checkpoint, is shown in the bar until the next success.
        """
        self._write(event_record(step, event, **details))
        for failure, (success, warning_text) in FAILURES.items():
            if self.bar is not None and event in (failure, success):
                self.bar.warn(success, f"step {step:,} {warning_text}" if event == failure else None)
        if self.chart is not None and event == RunEvent.CHECKPOINT:
            self.chart.redraw()

    @advisory("progress bar")
    def step_done(self) -> None:
        if self.bar is not None:
            self.bar.advance()

    def log(self, step: int, result: StepResult, remaining: Remaining, rank_seconds: list[float] | None = None) -> None:
        """Record and show a step. This is the only place that waits for the GPU.

        `rank_seconds`: how many seconds per step each rank spends on its own work, if there is a new measurement.
        """
        if self.bar is None:
            return
        self.last_loss, grad_norm = result.loss.item(), result.grad_norm.item()
        rates: dict[str, Any] = {}
        with advisory("rates of a step"):
            rates = self._rates(step)
        self.record(
            step,
            {
                Metric.TRAIN_LOSS: self.last_loss,
                Metric.LEARNING_RATE: result.learning_rate,
                # None means that fp16 gradients overflowed and the step was skipped.
                Metric.GRAD_NORM: grad_norm if math.isfinite(grad_norm) else None,
                **rates,
            },
        )
        if rank_seconds is not None:
            self.record(step, {Metric.RANK_SECONDS: [round(seconds, 6) for seconds in rank_seconds]})
        with advisory("progress bar"):
            if rank_seconds is not None:
                self.bar.warn("slowest rank", describe_slowest(rank_seconds))
            numbers = [f"loss {self.last_loss:.4f}", f"{rates[Metric.TOKENS_PER_SECOND]:,.0f} tok/s"]
            numbers += [] if rates[Metric.MFU] is None else [f"MFU {rates[Metric.MFU]:.1%}"]
            seconds = self.ledger.remaining_seconds(remaining) if remaining.steps else None
            self.bar.show(step, "  ".join(numbers + self._outlook(seconds)))

    def finish(self) -> str:
        """Draw the chart of the final state. Return `chart FILE` or, if nothing was drawn, `no chart`."""
        with advisory("chart"):
            if self.chart is not None and self.chart.finish():
                return f"chart {self.chart.file}"
        return "no chart"

    def close(self, lines: Iterable[str | Notice] = ()) -> None:
        """Close the bar, print the last lines and close the metrics log."""
        if self.bar is not None:
            with advisory("progress bar"):
                self.bar.close()
            show(*lines)
        if self.metrics is not None:
            self._record_dropped()
            self.metrics.close()

    def _rates(self, step: int) -> dict[str, Any]:
        tokens_per_second = self.plan.tokens_per_step * self.ledger.steps_per_second()
        mfu = None if self.peak_tokens is None else tokens_per_second / self.peak_tokens
        return {
            Metric.EPOCHS: [read["epochs"] for read in self.plan.read_until(step)],
            Metric.TOKENS_PER_SECOND: round(tokens_per_second, 1),
            Metric.MFU: mfu,
            Metric.PEAK_MEMORY_BYTES: peak_memory_bytes(self.device),
            Metric.ELAPSED_SECONDS: round(self.ledger.elapsed_seconds(), 3),
        }

    def _outlook(self, remaining_seconds: float | None) -> list[str]:
        parts = [] if remaining_seconds is None else [f"ETA {duration(remaining_seconds)}"]
        spent = self.ledger.usd()
        if spent is not None:
            usd = None if remaining_seconds is None else time_cost(remaining_seconds, self.ledger.price_per_hour)
            parts.append(f"{dollars(spent)} spent" + ("" if usd is None else f", {dollars(usd)} to go"))
        return parts

    def _write(self, record: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(record)
            self._step = record["step"]
            self._record_dropped()

    def _record_dropped(self) -> None:
        assert self.metrics is not None
        for name, problem in newly_dropped():
            self.metrics.write(event_record(self._step, RunEvent.DROPPED, what=name, **{Detail.PROBLEM: problem}))


def introduce(run: Run, plan: Plan, numerics: Numerics, ranks: Ranks) -> list[str | Notice]:
    """Return the lines that a job prints first: the run, the ranks, the numerical settings and the plan."""
    compiled = {False: "not compiled", True: "compiled", "model": "compiled as one graph"}[numerics.compiled]
    name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    execution = run.train.execution
    wrapper = execution.parallel if ranks.world_size > 1 else "one process"
    if execution.shards > 1:
        wrapper += f", layers in {execution.shards} tensor shards on {execution.tensor_parallel} ranks"
    settings = f"{wrapper}, {numerics.precision}, {compiled}, determinism {numerics.determinism}"
    head = f"{run.directory}: {ranks.world_size} x {name}, {settings}"
    lines: list[str | Notice] = [head, *describe(run.model, run.train, plan)]
    visible = torch.cuda.device_count() if ranks.device.type == "cuda" else 0
    if visible > ranks.node.size:
        idle = f"{visible - ranks.node.size} of this machine's {visible} GPUs are idle"
        lines.append(warning(f"{idle}; start with torchrun --nproc_per_node={visible}"))
    return lines


def nothing_to_do(directory: Path, steps: int, position: Position, *, out_of_patience: bool) -> str:
    """Return a line for a job with no steps left to train. `out_of_patience` says whether patience ended the run."""
    if out_of_patience:
        return f"{directory}: complete: patience ended it at step {position.step:,} of {steps:,}{_best(position)}"
    if position.step < steps:
        return f"{directory}: at step {position.step:,} of {steps:,}; --max-steps allows no more steps"
    return f"{directory}: the run is complete: {steps:,} steps{_best(position)}; start over with --resume never"


def summarize(directory: Path, reporter: Reporter, position: Position, stopped_by: str | None, chart: str) -> list[str]:
    """Return the outcome of a job as lines. `stopped_by` is one of `EarlyEnd`, or None if the job did not end early."""
    plan, ledger = reporter.plan, reporter.ledger
    tokens = ledger.steps * plan.tokens_per_step
    outcome = "done" if position.step == plan.steps else "paused by --max-steps"
    if position.step < plan.steps and stopped_by is not None:
        outcome = "stopped early; run the same command again to continue"
        if stopped_by == EarlyEnd.PATIENCE:
            outcome = "done, ended by patience"
        elif stopped_by != EarlyEnd.SIGNAL:
            outcome = f"stopped early by {stopped_by}; to continue, run the same command with a larger {stopped_by}"
    loss = reporter.last_loss
    losses = ("" if math.isnan(loss) else f", train loss {loss:.4f}") + _best(position)
    return [
        f"{directory}: {outcome}: step {position.step:,} of {plan.steps:,}{losses}",
        *(
            "data: "
            + ("" if read["epochs"] is None else f"{read['epochs']:.2f} epochs, ")
            + f"{read['tokens']:,} tokens of {read['dataset']}"
            for read in plan.read_until(position.step)
        ),
        f"{tokens:,} tokens in {duration(ledger.process_seconds())}, "
        f"{tokens / ledger.training_seconds():,.0f} tokens/s while training",
        f"weights {directory / 'checkpoints' / 'latest'}, {chart}",
    ]


def describe_slowest(rank_seconds: list[float]) -> str | None:
    """Describe the slowest rank if its time exceeds the median by SLOW_SHARE; otherwise return None."""
    slowest, median = max(rank_seconds), statistics.median_low(rank_seconds)
    if slowest <= (1 + SLOW_SHARE) * median:
        return None
    return f"slowest: rank {rank_seconds.index(slowest)}, {slowest:.3g} s per step (median {median:.3g})"


def _best(position: Position) -> str:
    if position.best_validation_loss is None:
        return ""
    return f", best validation loss {position.best_validation_loss:.4f} at step {position.best_step:,}"
