"""Training loop: for each step, train, then log, validate and save. It stops on request or when the run diverges."""

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
    """The intervals, in steps, at which the loop logs, validates and saves. `step` is the number of updates so far."""

    log: int
    checkpoint: int
    validation: int | None  # None: no validation
    patience: int | None = None  # allowed number of checkpoints without a new best validation loss; None: no limit
    state_hash: int | None
    last_step: int  # where this job ends: the run's last step, or --max-steps

    def log_due(self, step: int) -> bool:
        return step % self.log == 0 or step in (1, self.last_step)

    def checkpoint_due(self, step: int) -> bool:
        return step > 0 and (step % self.checkpoint == 0 or step == self.last_step)

    def validation_due(self, step: int) -> bool:
        return self.validation is not None and (step % self.validation == 0 or self.checkpoint_due(step))

    def out_of_patience(self, position: Position) -> bool:
        """Return whether the run ends early because `patience` checkpoints have passed since the best one."""
        step, best = position.step, position.best_step
        if self.patience is None or best is None:
            return False
        return step // self.checkpoint - best // self.checkpoint >= self.patience

    def is_done(self, position: Position) -> bool:
        """Return whether all steps and the last validation are done. A stop may have interrupted that validation."""
        step = position.step
        if position.validation_loss is None and step <= self.last_step and self.validation_due(step):
            return False
        return step >= self.last_step or self.out_of_patience(position)

    def hash_due(self, step: int) -> bool:
        return self.state_hash is not None and step % self.state_hash == 0

    @advisory("remaining time")
    def remaining(self, step: int) -> Remaining:
        """Return the remaining work of this job, including the validation and the checkpoint of `step`."""
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
    validations: Mapping[str, Validation]  # dataset -> validation; the first one decides which checkpoint is best
    saving: Saving
    reporter: Reporter
    heartbeat: Heartbeat
    stop_request: StopRequest

    def run_steps(self) -> bool:
        """Run to the last step; return False if the loop stopped early with a checkpoint. Raises Diverged."""
        self._complete_interrupted_work()
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
            self._log_validate_save(step + 1, result)
            collect_garbage(step + 1 - first_step)
        self.saving.settle(required=True)
        out_of_patience = self.intervals.out_of_patience(self.state.position)
        if out_of_patience:
            patience = self.intervals.patience
            line = f"no better validation loss in {patience} checkpoints; the run ends, because patience is {patience}"
            show(progress(line), once=True)
        ended = out_of_patience or self.state.position.step == reporter.plan.steps
        self._report_end(RunEvent.END if ended else RunEvent.PAUSE, EarlyEnd.PATIENCE if out_of_patience else None)
        return True

    def _count_step(self, step: int) -> None:
        self.reporter.ledger.after_step(self.feed.waited_seconds)
        tokens = step * self.reporter.plan.tokens_per_step
        self.state.position = attrs.evolve(self.state.position, step=step, tokens=tokens, validation_loss=None)
        self.reporter.step_done()
        self.saving.poll()

    def _log_validate_save(self, step: int, result: StepResult) -> None:
        """After a step, log, validate and save, in this order. Whatever is not due is skipped."""
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
            self.saving.settle()  # waits for the previous save, which usually ended long ago
        if validating:
            self._validate()
        if saving:
            self._save()

    def _complete_interrupted_work(self) -> None:
        """Validate if a due validation is missing: before the first step, or if a stop interrupted the validation."""
        position = self.state.position
        if position.validation_loss is None and self.intervals.validation_due(position.step):
            self._validate()
            if self.state.position.validation_loss is not None and self.intervals.checkpoint_due(position.step):
                self._save()  # this time with the validation loss, which may be the best one

    def _check_guard(self) -> None:
        """Raise Diverged if the guard has found a loss or gradient norm that ends the run. Call it on every rank."""
        problem = self.state.guard.problem()
        if problem is not None:
            self.saving.settle()
            self.reporter.event(self.state.position.step, RunEvent.DIVERGED, **{Detail.PROBLEM: problem})
            raise Diverged(f"{problem}; the last checkpoint, in {self.saving.directory}, is unchanged")

    def _check_token_files(self, *, wait: bool = False) -> None:
        """Raise BadInput if the content of a token file has changed since the run began.

        The first rank of each machine checks this. Only that rank raises the error.
        """
        if self.heartbeat.ranks.node.rank == 0:
            for path in self.feed.watch.check(wait=wait):
                show(warning(f"{path}: was modified while the run was reading it, but its content is the same"))

    def _validate(self) -> None:
        """Measure the loss on each dataset, unless a request to stop interrupts this. Call it on every rank."""
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
        all_losses = {Metric.VALIDATION_LOSSES: losses} if len(losses) > 1 else {}
        self.reporter.record(
            position.step, {Metric.VALIDATION_LOSS: loss, **all_losses, Metric.ELAPSED_SECONDS: elapsed}
        )
        by_dataset = ", ".join(f"{dataset} {dataset_loss:.4f}" for dataset, dataset_loss in losses.items())
        line = f"step {position.step:,}: validation loss {f'of {by_dataset}' if all_losses else f'{loss:.4f}'}"
        show(progress(line), once=True)

    def _save(self) -> None:
        self._check_token_files(wait=True)  # so that no checkpoint contains updates from changed tokens
        self.saving.begin()

    def _stop_early(self) -> None:
        self._check_guard()
        if self.saving.newest != self.state.position.step:
            self.saving.settle()
            self._save()
        self.saving.settle(required=True)
        self._report_end(RunEvent.STOPPED, self.stop_request.cause)

    def _report_end(self, event: str, early_end: str | None) -> None:
        """Record the end of training, the tokens read from each dataset and, if training ended early, the reason."""
        step = self.state.position.step
        details = {} if early_end is None else {Detail.REASON: early_end}
        self.reporter.event(step, event, **details, **{Detail.SOURCES: self.reporter.plan.read_until(step)})


def collect_garbage(steps: int) -> None:
    """Collect reference cycles on all ranks after the same step. `steps` counts the steps of this process from 1.

    By default, Python collects garbage after a certain number of allocations. Every rank would reach that number at a
    different time, and all ranks would wait for the rank that is collecting. A full collection of everything that torch
    has imported takes 0.2 s; karpathy/nanochat saw half a second.
    """
    if steps == 1:
        gc.collect()
        gc.freeze()  # later collections skip the objects that exist now, which live as long as the process
        gc.disable()
    elif steps % GARBAGE_INTERVAL_STEPS == 0:
        gc.collect()
