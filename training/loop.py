"""The steps of a run: train, log, validate, save, in that order; stop when asked, or when the guard says so."""

import math
import sys
import time
from typing import Any

import attrs

from common.clock import utc_now
from common.errors import BadInput, Diverged, printable
from model.config import flops_per_token
from training.checkpoints.async_writer import Saved, Saver
from training.checkpoints.disk import checkpoints_of
from training.checkpoints.storage import name_of
from training.checkpoints.tensor_files import state_sha256
from training.config.batch_plan import VALIDATION_SHARE, count_due
from training.data.follow_tokens import wait_for_step
from training.data.watch_tokens import TokenWatch
from training.garbage import collect_between_steps
from training.hardware.environment import peak_flops, peak_memory_bytes
from training.job import Job
from training.planning.budget import expected_save_seconds
from training.prefetch import Feed
from training.state import StepSettings, TrainState
from training.step import StepResult, train_step
from training.supervision.heartbeat import Heartbeat
from training.supervision.stop_request import StopRequest
from training.telemetry.chart import ChartProcess
from training.telemetry.metrics_log import MetricsLog
from training.telemetry.progress_bar import ProgressBar, Status
from training.telemetry.time_ledger import Remaining, TimeLedger


def validation_due(job: Job, step: int) -> bool:
    """Tell whether to validate after `step` updates: at intervals, before a run's first step, with each checkpoint."""
    interval = job.run.train.validation.validation_interval
    if interval is None:
        return False
    return step % interval == 0 or checkpoint_due(job, step)


def checkpoint_due(job: Job, step: int) -> bool:
    """Tell whether to save after `step` updates: at intervals and at the end."""
    return step > 0 and (step % job.run.train.checkpoints.checkpoint_interval == 0 or step == job.last_step)


class Loop:
    """Trains from where `state` stands. One object per process; rank 0's writes and shows."""

    def __init__(self, state: TrainState, settings: StepSettings, heartbeat: Heartbeat, job: Job, ledger: TimeLedger):
        self.state, self.settings, self.heartbeat, self.job, self.ledger = state, settings, heartbeat, job, ledger
        ranks, position = heartbeat.ranks, state.position
        self.ranks = ranks
        self.peak = peak_flops(ranks.device)
        steps = range(position.step, job.last_step)
        self.feed = Feed(job.reading, state.parallel.data_parallel.rank, ranks.device, steps)
        coordinates = ranks.coordinates
        self.bar = ProgressBar(position.step, job.plan.steps) if coordinates else None
        self.metrics = MetricsLog(job.run.directory, self.bar.say) if self.bar is not None else None
        self.chart = ChartProcess(job.run.directory) if coordinates else None
        streams = [source.stream for source in job.reading.sources]
        streams += [] if job.validation is None else [job.validation.stream]
        self.token_watch = TokenWatch(streams, job.token_digests)
        keep = job.run.train.checkpoints.keep_checkpoints
        self.saver = Saver(checkpoints_of(job.run.directory), keep, state, ranks, job.config)
        self._save_seconds = expected_save_seconds(job.run.model, state.optimizer.state_bytes)
        self.stop_request = StopRequest(ranks, job.stop_asked, self._budget_reached)
        self._best = (position.best_step, position.best_validation_loss)  # of what is on the disk
        self._newest_save = position.step or None  # step of the newest checkpoint, be it still in flight
        self._told_save: int | None = None  # step of the last save whose end was told
        self.first_step = position.step
        self.last_loss = float("nan")  # of the last logged step
        self._logged_step = position.step
        self._logged_seconds = 0.0

    def train(self, numerics_changes: list[str]) -> bool:
        """Run to the last step; return False when it stopped early with a checkpoint. Raises Diverged."""
        if numerics_changes:
            self._event("numerics-drift", changes=numerics_changes)
        self._event(
            "start",
            world_size=self.ranks.world_size,
            commit=self.job.config.git_commit,
            price_per_hour=self.job.price_per_hour,
            elapsed_seconds=round(self.ledger.elapsed_seconds(), 3),
        )
        if self.job.config.self_test is not None:
            self._event("self-test", **self.job.config.self_test)
        try:
            with self.ledger.measure("training"):
                return self._run_steps()
        finally:
            self.feed.close()
            if self.bar is not None:
                self.bar.close()

    def close(self) -> dict[str, Any]:
        """Write where the time went as the last line of the metrics; return it."""
        record = self.ledger.record(self.feed.waited_seconds)
        if self.metrics is not None:
            self.metrics.write({"step": self.state.position.step, **record, "time": utc_now()})
            self.metrics.close()
        return record

    def _run_steps(self) -> bool:
        self._catch_up()
        for step in range(self.first_step, self.job.last_step):
            if self.stop_request.agreed():
                self._stop_early()
                return False
            if self.job.reading.growing and not self._data_is_there(step):
                self._stop_early()
                return False
            self.heartbeat.begin_step(step + 1)
            result = train_step(self.state, self.settings, self.ranks, step, self.feed.next)
            self._finish_step(step + 1, result)
            collect_between_steps(step + 1 - self.first_step)
        self._settle(insist=True)
        self._event("end" if self.job.last_step == self.job.plan.steps else "pause", sources=self._sources())
        return True

    def _budget_reached(self) -> bool:
        """Tell whether the next step may be one too many: what follows has to fit as well.

        That is the save in flight, the last one, and a validation where one is due: one cut short is paid for nothing,
        and once a GPU has been given its batches nothing stops it.
        """
        seconds = (2 if self.saver.in_flight else 1) * self._save_seconds
        if validation_due(self.job, self.state.position.step + 1):
            seconds += self.ledger.typical_seconds("validation") or self._first_validation_seconds()
        return self.job.budget.reached(self.ledger, seconds)

    def _first_validation_seconds(self) -> float:
        """Return what a validation may take by the speed of training, before this process has seen one."""
        plan = self.job.plan
        tokens = VALIDATION_SHARE * plan.validation_sequences * plan.layout.context_length
        return self.ledger.longest_step_seconds() * tokens / plan.tokens_per_step

    def _data_is_there(self, step: int) -> bool:
        """Wait for a step's tokens; return False when asked to stop meanwhile."""

        def say(line: str) -> None:
            if self.bar is not None:
                self.bar.say(line)

        began = time.perf_counter()
        there = wait_for_step(self.job.reading, step, self.ranks, self.stop_request, say)
        self.feed.waited_seconds += time.perf_counter() - began
        return there

    def _catch_up(self) -> None:
        """Validate where that is due but not done: before the first step of all, or when a stop cut it short."""
        if self.state.position.validation_loss is None and validation_due(self.job, self.state.position.step):
            self._validate()
            if self.state.position.validation_loss is not None and checkpoint_due(self.job, self.state.position.step):
                self._save()  # once more, with its loss: it may be the best

    def _finish_step(self, step: int, result: StepResult) -> None:
        """Account for a step and do what is due after it; `step` counts the updates done."""
        job = self.job
        self.ledger.after_step(self.feed.waited_seconds)
        position = self.state.position
        self.state.position = attrs.evolve(
            position, step=step, tokens=step * job.plan.tokens_per_step, validation_loss=None
        )
        if self.bar is not None:
            self.bar.advance()
        self._tell_save(self.saver.ended())
        saving, validating = checkpoint_due(job, step), validation_due(job, step)
        logging = step % job.run.train.log_interval == 0 or step in (1, job.last_step)
        if logging or saving or validating or self.ranks.device.type == "cpu":
            self._check_guard()
        if logging and self.ranks.coordinates:
            self._log(result)
        if logging:
            self._check_token_files()
        if job.hash_every is not None and step % job.hash_every == 0:
            self._hash()
        if saving:
            self._settle()  # the save before, on the disk long ago unless saves follow each other closely
        if validating:
            self._validate()
        if saving:
            self._save()

    def _check_guard(self) -> None:
        """Tell of steps that were skipped; raise Diverged for one that ends the run. Call it on every rank."""
        skips = self.state.guard.new_skips()
        if skips is not None and self.bar is not None:
            self._event("spike-skipped", skipped=skips.count, last_skipped_step=skips.last.step, reason=str(skips.last))
            self.bar.say(f"{skips.last}; the update was skipped, {skips.total:,} so far")
        problem = self.state.guard.problem()
        if problem is not None:
            self._settle()
            self._event("diverged", problem=problem)
            raise Diverged(f"{problem}; the last checkpoint is as it was: {self.job.run.directory / 'checkpoints'}")

    def _check_token_files(self, *, wait: bool = False) -> None:
        """Raise BadInput, on one rank of a machine alone, for a token file that was written since the run began."""
        if self.ranks.local_rank == 0:
            for path in self.token_watch.check(wait=wait):
                line = f"WARNING: {path}: was touched while the run reads it; its content is as it was"
                if self.bar is not None:
                    self.bar.say(line)
                else:
                    print(printable(line), file=sys.stderr, flush=True)

    def _log(self, result: StepResult) -> None:
        assert self.bar is not None and self.metrics is not None
        step = self.state.position.step
        loss, grad_norm = result.loss.item(), result.grad_norm.item()  # the one wait for the GPU
        self.last_loss = loss
        training_seconds = self.ledger.training_seconds()
        tokens = (step - self._logged_step) * self.job.plan.tokens_per_step
        tokens_per_second = tokens / (training_seconds - self._logged_seconds)
        self._logged_step, self._logged_seconds = step, training_seconds
        mfu = None
        if self.peak is not None:
            mfu = flops_per_token(self.job.run.model) * tokens_per_second / (self.peak * self.ranks.world_size)
        elapsed = self.ledger.elapsed_seconds()
        self.metrics.write(
            {
                "step": step,
                "train_loss": loss,
                "learning_rate": result.learning_rate,
                "epochs": [read["epochs"] for read in self._sources()],
                "grad_norm": grad_norm if math.isfinite(grad_norm) else None,  # fp16 overflowed: the step was skipped
                "tokens_per_second": round(tokens_per_second, 1),
                "mfu": mfu,
                "peak_memory_bytes": peak_memory_bytes(self.ranks.device),
                "elapsed_seconds": round(elapsed, 3),
                **self.state.guard.metrics(),
            }
        )
        remaining, usd = self.ledger.remaining_seconds(self._remaining()), self.ledger.usd()
        expected_usd = None if remaining is None else self.ledger.usd(remaining)
        self.bar.show(
            Status(
                step=step,
                loss=loss,
                tokens_per_second=tokens_per_second,
                mfu=mfu,
                remaining_seconds=remaining,
                spent_usd=usd,
                remaining_usd=None if expected_usd is None or usd is None else expected_usd - usd,
            )
        )

    def _hash(self) -> None:
        digest = state_sha256(self.state, self.ranks)
        if self.metrics is not None:
            self.metrics.write({"step": self.state.position.step, "state_sha256": digest})

    def _validate(self) -> None:
        assert self.job.validation is not None
        with self.ledger.measure("validation"):
            loss = self.job.validation.measure(self.state, self.settings, self.ranks, self.stop_request)
        if loss is None:
            return
        best = self.state.position.best_validation_loss
        saved = checkpoint_due(self.job, self.state.position.step)
        self.state.position = attrs.evolve(self.state.position, validation_loss=loss)
        if saved and (best is None or loss < best):
            self.state.position = attrs.evolve(
                self.state.position, best_step=self.state.position.step, best_validation_loss=loss
            )
        if self.bar is not None and self.metrics is not None:
            elapsed = round(self.ledger.elapsed_seconds(), 3)
            self.metrics.write({"step": self.state.position.step, "validation_loss": loss, "elapsed_seconds": elapsed})
            self.bar.say(f"step {self.state.position.step:,}: validation loss {loss:.4f}")

    def _save(self) -> None:
        self._check_token_files(wait=True)  # a checkpoint never holds what was learnt of other content
        with self.ledger.measure("checkpoints"):
            self.state.position = attrs.evolve(self.state.position, elapsed_seconds=self.ledger.elapsed_seconds())
            self.saver.begin()
        self._newest_save = self.state.position.step

    def _settle(self, *, insist: bool = False) -> None:
        """Wait until the save in flight is on the disk. Raises BadInput when it is not, if the run depends on it."""
        with self.ledger.measure("checkpoints", counts=False):
            saved = self.saver.settle()
        if saved is None:
            return
        if saved.durable:
            self._best = (saved.position.best_step, saved.position.best_validation_loss)
        else:
            best_step, best_loss = self._best
            self.state.position = attrs.evolve(self.state.position, best_step=best_step, best_validation_loss=best_loss)
        self._tell_save(saved)
        if insist and not saved.durable:
            raise BadInput(
                f"{saved.problem}; the last steps are not saved, older checkpoints are as they were: fix this, then "
                "rerun the same command"
            )

    def _tell_save(self, saved: Saved | None) -> None:
        """Record how a save went, once."""
        if saved is not None:
            self._save_seconds = saved.stall_seconds + saved.write_seconds
        if saved is None or saved.position.step == self._told_save or self.bar is None or self.chart is None:
            return
        step = self._told_save = saved.position.step
        seconds = {"stall_seconds": round(saved.stall_seconds, 4), "write_seconds": round(saved.write_seconds, 3)}
        problem = {} if saved.problem is None else {"problem": saved.problem}
        event = "checkpoint" if saved.durable else "checkpoint-failed"
        self._event(event, step=step, name=name_of(step), **seconds, **problem)
        if saved.problem is not None:
            what = "saved, but" if saved.durable else "NOT SAVED, to be tried again at the next checkpoint:"
            self.bar.say(f"WARNING: step {step:,}: {what} {saved.problem}")
        self.bar.warn(None if saved.durable else f"step {step:,} NOT SAVED")
        if saved.durable:
            self.chart.redraw()

    def _stop_early(self) -> None:
        self._check_guard()
        if self._newest_save != self.state.position.step:
            self._settle()
            self._save()
        self._settle(insist=True)
        self._event("stopped", reason=self.stopped_by(), sources=self._sources())

    def stopped_by(self) -> str:
        """Return what asked for the stop that was agreed on: a signal, or the option that limits the run."""
        left = None if self.stop_request.signalled else self.job.budget.seconds_left(self.ledger)
        return "signal" if left is None else left[1]

    def _sources(self) -> list[dict[str, Any]]:
        return self.job.plan.read_until(self.state.position.step)

    def _event(self, event: str, *, step: int | None = None, **details: Any) -> None:
        if self.metrics is not None:
            at = self.state.position.step if step is None else step
            self.metrics.write({"event": event, "step": at, **details, "time": utc_now()})

    def _remaining(self) -> Remaining:
        first, last = self.state.position.step, self.job.last_step  # what is due at this step comes after it was logged
        every = self.job.run.train.checkpoints.checkpoint_interval
        validate_every = self.job.run.train.validation.validation_interval
        return Remaining(
            steps=last - first,
            validations=0 if validate_every is None else count_due(first, last, every, validate_every),
            checkpoints=count_due(first, last, every),
        )
