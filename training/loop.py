"""Training loop: for each step, train; then log, validate, save. Stops when asked, or when the guard says so."""

import gc
from collections.abc import Mapping

import attrs

from common.errors import Diverged
from common.output import advisory, progress, show, warning
from training.checkpoints.tensor_files import state_sha256
from training.config.batch_plan import count_due
from training.prefetch import Feed
from training.saving import Saving
from training.state import Position, StepSettings, TrainState
from training.step import StepResult, train_step
from training.supervision.heartbeat import Heartbeat
from training.supervision.stop_request import StopRequest
from training.telemetry.metrics_log import Detail, EarlyEnd, Metric, RunEvent
from training.telemetry.reporter import Reporter
from training.telemetry.time_ledger import Remaining
from training.validation import Validation

GARBAGE_INTERVAL_STEPS = 1000


@attrs.frozen(kw_only=True)
class Intervals:
    """Intervals in steps. A `step` here counts the updates done."""

    log: int
    checkpoint: int
    validation: int | None  # None: no validation
    patience: int | None = None  # checkpoints without a new best validation loss; None: any number
    state_hash: int | None
    last_step: int  # where this job ends: the run's last step, or --max-steps

    def log_due(self, step: int) -> bool:
        return step % self.log == 0 or step in (1, self.last_step)

    def checkpoint_due(self, step: int) -> bool:
        return step > 0 and (step % self.checkpoint == 0 or step == self.last_step)

    def validation_due(self, step: int) -> bool:
        return self.validation is not None and (step % self.validation == 0 or self.checkpoint_due(step))

    def out_of_patience(self, position: Position) -> bool:
        """Tell whether a validated position ends the run early: as many checkpoints since the best one."""
        step, best = position.step, position.best_step
        if self.patience is None or best is None:
            return False
        return step // self.checkpoint - best // self.checkpoint >= self.patience

    def is_done(self, position: Position) -> bool:
        """Tell whether neither a step nor the last validation is left, which a stop may have cut short."""
        step = position.step
        if position.validation_loss is None and step <= self.last_step and self.validation_due(step):
            return False
        return step >= self.last_step or self.out_of_patience(position)

    def hash_due(self, step: int) -> bool:
        return self.state_hash is not None and step % self.state_hash == 0

    @advisory("remaining time")
    def remaining(self, step: int) -> Remaining:
        """Return the work of this job from a step on, its own validation and checkpoint included."""
        return Remaining(
            steps=self.last_step - step,
            validations=count_due(step, self.last_step, self.checkpoint, self.validation) if self.validation else 0,
            checkpoints=count_due(step, self.last_step, self.checkpoint),
        )


@attrs.frozen(kw_only=True)
class Loop:
    """Training loop of one rank. It starts at the position of the state."""

    state: TrainState
    settings: StepSettings
    intervals: Intervals
    feed: Feed
    validations: Mapping[str, Validation]  # by dataset; the loss on the first decides which checkpoint is best
    saving: Saving
    reporter: Reporter
    heartbeat: Heartbeat
    stop_request: StopRequest

    def run_steps(self) -> bool:
        """Run to the last step; return False when it stopped early with a checkpoint. Raises Diverged."""
        self._catch_up()
        first_step, clock, stopping = self.state.position.step, self.state.parallel.clock, self.stop_request.agreed
        ranks, reporter = self.heartbeat.ranks, self.reporter
        for step in range(first_step, self.intervals.last_step):
            if self.intervals.out_of_patience(self.state.position):
                break
            if stopping() or not self.feed.wait_for_tokens(step, ranks, stopping):
                self._stop_early()
                return False
            self.heartbeat.begin_step(step + 1, clock.totals)
            with clock.timed():
                result = train_step(self.state, self.settings, step, self.feed.next)
            self._count_step(step + 1)
            self._do_what_is_due(step + 1, result)
            collect_garbage(step + 1 - first_step)
        self.saving.settle(required=True)
        settled = self.intervals.out_of_patience(self.state.position)
        if settled:
            line = f"no better validation loss in {self.intervals.patience} checkpoints: patience ends the run"
            show(progress(line), once=True)
        ended = settled or self.state.position.step == reporter.plan.steps
        self._report_end(RunEvent.END if ended else RunEvent.PAUSE, EarlyEnd.PATIENCE if settled else None)
        return True

    def _count_step(self, step: int) -> None:
        self.reporter.ledger.after_step(self.feed.waited_seconds)
        tokens = step * self.reporter.plan.tokens_per_step
        self.state.position = attrs.evolve(self.state.position, step=step, tokens=tokens, validation_loss=None)
        self.reporter.step_done()
        self.saving.poll()

    def _do_what_is_due(self, step: int, result: StepResult) -> None:
        logging, saving = self.intervals.log_due(step), self.intervals.checkpoint_due(step)
        validating = self.intervals.validation_due(step)
        if logging or saving or validating or self.heartbeat.ranks.device.type == "cpu":
            self._check_guard()
        if logging:
            self.reporter.log(step, result, self.intervals.remaining(step), self.heartbeat.beats.rank_seconds())
            self._check_token_files()
        if self.intervals.hash_due(step):
            self.reporter.record(step, {Metric.STATE_SHA256: state_sha256(self.state, self.heartbeat.ranks)})
        if saving:
            self.saving.settle()  # the previous save, on the disk long ago unless saves follow each other closely
        if validating:
            self._validate()
        if saving:
            self._save()

    def _catch_up(self) -> None:
        """Validate where that is due but not done: before a run's first step, or when a stop cut it short."""
        position = self.state.position
        if position.validation_loss is None and self.intervals.validation_due(position.step):
            self._validate()
            if self.state.position.validation_loss is not None and self.intervals.checkpoint_due(position.step):
                self._save()  # once more, with its loss: it may be the best

    def _check_guard(self) -> None:
        """Raise Diverged for a step that ends the run. Call it on every rank."""
        problem = self.state.guard.problem()
        if problem is not None:
            self.saving.settle()
            self.reporter.event(self.state.position.step, RunEvent.DIVERGED, **{Detail.PROBLEM: problem})
            raise Diverged(f"{problem}; the last checkpoint is as it was: {self.saving.directory}")

    def _check_token_files(self, *, wait: bool = False) -> None:
        """Raise BadInput, on one rank of a machine alone, for a token file that was written since the run began."""
        if self.heartbeat.ranks.node.rank == 0:
            for path in self.feed.watch.check(wait=wait):
                line = f"{path}: was touched while the run reads it; its content is as it was"
                show(warning(line))

    def _validate(self) -> None:
        """Measure the loss on each dataset, unless asked to stop meanwhile. Call it on every rank."""
        assert self.validations
        losses = {}
        with self.reporter.ledger.measure("validation"):
            for dataset, validation in self.validations.items():
                loss = validation.measure(self.state, self.settings, self.heartbeat.ranks, self.stop_request.agreed)
                if loss is None:
                    return
                losses[dataset] = loss
        loss = next(iter(losses.values()))
        position = attrs.evolve(self.state.position, validation_loss=loss)
        best = position.best_validation_loss
        if self.intervals.checkpoint_due(position.step) and (best is None or loss < best):
            position = attrs.evolve(position, best_step=position.step, best_validation_loss=loss)
        self.state.position = position
        elapsed = round(self.reporter.ledger.elapsed_seconds(), 3)
        several = {Metric.VALIDATION_LOSSES: losses} if len(losses) > 1 else {}
        values = {Metric.VALIDATION_LOSS: loss, **several, Metric.ELAPSED_SECONDS: elapsed}
        self.reporter.record(position.step, values)
        each = ", ".join(f"{dataset} {value:.4f}" for dataset, value in losses.items())
        line = f"step {position.step:,}: validation loss {f'of {each}' if several else f'{loss:.4f}'}"
        show(progress(line), once=True)

    def _save(self) -> None:
        self._check_token_files(wait=True)  # a checkpoint never holds updates from changed tokens
        self.saving.begin()

    def _stop_early(self) -> None:
        self._check_guard()
        if self.saving.newest != self.state.position.step:
            self.saving.settle()
            self._save()
        self.saving.settle(required=True)
        self._report_end(RunEvent.STOPPED, self.stop_request.cause)

    def _report_end(self, event: str, early_end: str | None) -> None:
        """Record the end of this job's training: the reason if it is early, and the tokens read of each dataset."""
        step = self.state.position.step
        details = {} if early_end is None else {Detail.REASON: early_end}
        self.reporter.event(step, event, **details, **{Detail.SOURCES: self.reporter.plan.read_until(step)})


def collect_garbage(steps: int) -> None:
    """Collect reference cycles on all ranks after the same steps; `steps` counts those of this process from 1.

    Left to itself each rank collects when it has made enough objects, each at another time, and all wait for the one
    that does. A full collection takes 0.2 s with all that torch has imported; karpathy/nanochat saw half a second.
    """
    if steps == 1:
        gc.collect()
        gc.freeze()  # the objects that stay for good
        gc.disable()
    elif steps % GARBAGE_INTERVAL_STEPS == 0:
        gc.collect()
