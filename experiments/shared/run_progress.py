"""The progress of a run: the steps in its checkpoints and metrics, and the step that it must reach."""

import math
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, Problem
from common.json_files import open_regular
from common.text import dollars, time_cost
from experiments.shared.training_jobs import ROOT
from training.checkpoints.directory import checkpoints_of, linked_folders, step_of, steps_in
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.data.locate_tokens import lengths_at_hand
from training.telemetry.metrics_log import METRICS, STATES, Detail, Metric, RunEvent, event_of, read_metrics

TAIL_BYTES = 1 << 13  # only this many bytes at the end of the metrics file are read; they hold about ten lines


@attrs.frozen(kw_only=True)
class RunProgress:
    """The progress of a run, read from its files. The progress is correct even if a job was killed."""

    steps: int  # step of the newest checkpoint
    losses: dict[int, float]  # validation loss by step
    stopped_by: str | None  # the reason why the last job stopped early, if it did
    diverged: str | None  # the problem if the run diverged, otherwise None
    ended: int | None  # last step of the run, if it has ended

    def reached(self, step: int, last_step: int, *, validates: bool) -> bool:
        """Return whether the run has been trained to a step.

        The run must have ended, or have a checkpoint at this step or later. If the run `validates`, it must also have
        the validation loss at this step.
        """
        return (self.steps >= step or self.ended == last_step) and (step in self.losses or not validates)

    def loss_at(self, step: int) -> float | None:
        """Return the validation loss at a step.

        The loss is infinite if the run diverged before this step, and None if no loss was recorded.
        """
        loss = self.losses.get(step, None if self.diverged is None else math.inf)
        return loss if loss is None or math.isfinite(loss) else math.inf


def read_progress(directory: Path) -> RunProgress:
    """Return a run's progress. The step is 0 if the run has not started."""
    records = read_metrics(directory)
    validated = [record for record in records if Metric.VALIDATION_LOSS in record]
    last: dict[str, Any] = next((record for record in reversed(records) if event_of(record) in STATES), {})
    checkpoints = checkpoints_of(directory)
    steps = [step_of(name) for name in steps_in(checkpoints)]
    if linked_folders(checkpoints):
        # When a run is copied, a link to a checkpoint can become a folder with the link's name. This name does not
        # tell the step; only the state in the folder does. The import is not at the top of this file, because the
        # imported module loads the network, which a trial's candidate may have broken.
        from training.checkpoints.lookup import checkpoints_by_step

        steps = [*checkpoints_by_step(checkpoints)]
    return RunProgress(
        steps=max(steps, default=0),
        losses={record["step"]: record[Metric.VALIDATION_LOSS] for record in validated},
        stopped_by=last.get(Detail.REASON) if event_of(last) == RunEvent.STOPPED else None,
        diverged=last[Detail.PROBLEM] if event_of(last) == RunEvent.DIVERGED else None,
        ended=last.get("step") if event_of(last) == RunEvent.END else None,
    )


def measured_speed(directory: Path) -> float | None:
    """Return the tokens/s of a run that has ended, or None. The speed includes start-up and validation."""
    records = read_metrics(directory)
    ends = [record for record in records if event_of(record) == RunEvent.END]
    sources = ends[-1].get(Detail.SOURCES, ()) if ends else ()
    seconds = next((record[Metric.ELAPSED_SECONDS] for record in reversed(records) if Metric.LEDGER in record), 0)
    return sum(source["tokens"] for source in sources) / seconds or None if seconds > 0 else None


def describe_cost(work: float, unit: str, speeds: Sequence[float], price_per_hour: float | None) -> str:
    """Return a text with the hours that `work` takes at the median speed of earlier runs, and the cost if it is known.

    `work` is in tokens or FLOPs, and `unit` is the corresponding unit of speed.
    """
    if not speeds:
        return "time and cost: unknown until a run of this experiment has ended"
    seconds = work / statistics.median(speeds)
    usd = time_cost(seconds, price_per_hour)
    cost = "" if usd is None else f", {dollars(usd)}"
    speed = f"{unit} of 1 earlier run" if len(speeds) == 1 else f"median {unit} of {len(speeds)} earlier runs"
    return f"{seconds / 3600:.3g} hours{cost} if one run is trained at a time, at the {speed}"


def logged_step(directory: Path) -> int:
    """Return the step of the newest line of the metrics, or 0 if there is none. Only the end of the file is read."""
    try:
        with open_regular(directory / METRICS) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            steps = re.findall(rb'"step": (\d+)', file.read())
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0


@attrs.define
class Target:
    """A run, and the step to which it must be trained."""

    directory: Path
    last_step: int  # the last step of the complete run
    step: int  # the step to which the run must be trained
    validates: bool
    code: Path = ROOT  # folder of the train.py that trains the run
    done: bool = False
    awaited: bool = False  # whether a job of another process is training the run

    @classmethod
    def of(cls, directory: Path, until_step: int | None, ranks: int) -> "Target":
        """Return the target of a run. If `until_step` is None, the target is the run's end.

        Raise BadInput for an invalid run.
        """
        run = load_run(directory, ())
        if run.train.validation.patience is not None:
            cause = "all runs of an experiment are compared at the same step"
            raise BadInput(run.train.located(Problem(key="patience", expected="null", cause=cause)))
        plan = make_plan(run.train, run.model.context_length, ranks, lengths_at_hand(run.train))
        step = plan.steps if until_step is None else min(until_step, plan.steps)
        return cls(directory, plan.steps, step, plan.validation_sequences > 0)

    @property
    def name(self) -> str:
        return self.directory.name

    def end(self, progress: RunProgress) -> str | None:
        """Return how the run has ended: diverged, done or paused. Return None if it must still be trained."""
        if progress.diverged is not None:
            return "diverged"
        if not progress.reached(self.step, self.last_step, validates=self.validates):
            return None
        return "done" if self.step == self.last_step else "paused"

    def describe(self) -> str:
        """Return the run's progress as text."""
        steps = read_progress(self.directory).steps
        return f"at step {steps:,} of {self.last_step:,}" if steps else "not started"
