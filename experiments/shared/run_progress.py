"""Progress of a run: its steps, those in its checkpoints and metrics, and the step that it is to reach."""

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
from experiments.shared.experiment_files import counted
from experiments.shared.training_jobs import ROOT
from training.checkpoints.directory import checkpoints_of, linked_folders, step_of, steps_in
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.data.locate_tokens import lengths_at_hand
from training.telemetry.metrics_log import METRICS, STATES, Detail, Metric, RunEvent, event_of, read_metrics

TAIL_BYTES = 1 << 13  # of the metrics: some ten lines


@attrs.frozen(kw_only=True)
class RunProgress:
    """Progress of a run, kills included."""

    steps: int  # of the newest checkpoint
    losses: dict[int, float]  # validation loss by step
    stopped_by: str | None  # reason of the last job's early stop
    diverged: str | None  # the problem
    ended: int | None  # last step of the run, where it has ended

    def reached(self, step: int, last_step: int, *, validates: bool) -> bool:
        """Tell whether the run has ended or has a checkpoint from a step on, and has its validation loss there."""
        return (self.steps >= step or self.ended == last_step) and (step in self.losses or not validates)

    def loss_at(self, step: int) -> float | None:
        """Return the validation loss at a step, infinite where the run diverged before; None where it is not known."""
        loss = self.losses.get(step, None if self.diverged is None else math.inf)
        return loss if loss is None or math.isfinite(loss) else math.inf


def read_progress(directory: Path) -> RunProgress:
    """Return a run's progress; step 0 where it has not begun."""
    records = read_metrics(directory)
    validated = [record for record in records if Metric.VALIDATION_LOSS in record]
    last: dict[str, Any] = next((record for record in reversed(records) if event_of(record) in STATES), {})
    checkpoints = checkpoints_of(directory)
    steps = [step_of(name) for name in steps_in(checkpoints)]
    if linked_folders(checkpoints):
        # Only the state of a copied run tells its step. Reading it imports the network, which a trial may have broken.
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
    """Return the tokens/s of a run that has ended, start-up and validation included; None for any other."""
    records = read_metrics(directory)
    ends = [record for record in records if event_of(record) == RunEvent.END]
    sources = ends[-1].get(Detail.SOURCES, ()) if ends else ()
    seconds = next((record[Metric.ELAPSED_SECONDS] for record in reversed(records) if Metric.LEDGER in record), 0)
    return sum(source["tokens"] for source in sources) / seconds or None if seconds > 0 else None


def describe_cost(work: float, unit: str, speeds: Sequence[float], price_per_hour: float | None) -> str:
    """Return hours, and dollars at a price, of so many tokens or FLOPs, at the median of earlier runs' speeds."""
    if not speeds:
        return "time and cost: not known before a run of this experiment has ended"
    seconds = work / statistics.median(speeds)
    usd = time_cost(seconds, price_per_hour)
    cost = "" if usd is None else f", {dollars(usd)}"
    runs = counted(len(speeds), "earlier run")
    return f"{seconds / 3600:.3g} hours{cost} one run after the other, at the {unit} of {runs}"


def logged_step(directory: Path) -> int:
    """Return the step of the newest line of the metrics; 0 without one. It reads only the end of the file."""
    try:
        with open_regular(directory / METRICS) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            found = re.findall(rb'"step": (\d+)', file.read())
    except OSError:
        return 0
    return int(found[-1]) if found else 0


@attrs.define
class Target:
    """A run on its way to a step."""

    directory: Path
    last_step: int  # of the whole run
    step: int  # to reach
    validates: bool
    code: Path = ROOT  # folder of its train.py
    done: bool = False
    awaited: bool = False  # a job of another process trains it

    @classmethod
    def of(cls, directory: Path, until_step: int | None, ranks: int) -> "Target":
        """Return the target of a run, None: its end. Raises BadInput where it could not be trained."""
        run = load_run(directory, ())
        if run.train.validation.patience is not None:
            cause = "runs of an experiment are compared at one step"
            raise BadInput(run.train.located(Problem(key="patience", expected="null", cause=cause)))
        plan = make_plan(run.train, run.model.context_length, ranks, lengths_at_hand(run.train))
        step = plan.steps if until_step is None else min(until_step, plan.steps)
        return cls(directory, plan.steps, step, plan.validation_sequences > 0)

    @property
    def name(self) -> str:
        return self.directory.name

    def end(self, progress: RunProgress) -> str | None:
        """Return how the run has ended: diverged, done or paused; None where it is to be trained."""
        if progress.diverged is not None:
            return "diverged"
        if not progress.reached(self.step, self.last_step, validates=self.validates):
            return None
        return "done" if self.step == self.last_step else "paused"

    def place(self) -> str:
        """Return the run's progress, as text."""
        steps = read_progress(self.directory).steps
        return f"at step {steps:,} of {self.last_step:,}" if steps else "not begun"
