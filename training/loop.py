"""The steps of a run: train, log, validate, save, in that order; stop when asked, or when a step is not finite."""

import bisect
import math
import time
from typing import Any

import attrs

from errors import Diverged
from model.config import flops_per_token
from training import checkpoint
from training.chart import ChartProcess
from training.checkpoint import RunState
from training.config import Run
from training.feed import Feed, FeedSource
from training.hardware import peak_flops, peak_memory_bytes
from training.ledger import Ledger, Remaining
from training.metrics import MetricsLog
from training.plan import Plan
from training.progress import Progress, Status
from training.ranks import StopRequest
from training.step import StepResult, Trainer, train_step
from training.validation import Validation


@attrs.frozen(kw_only=True)
class Job:
    """What a loop works through, besides the trainer's state."""

    run: Run
    plan: Plan
    feed_source: FeedSource
    validation: Validation | None
    stop_request: StopRequest
    last_step: int  # plan.steps, or fewer with --max-steps
    price_per_hour: float | None  # USD
    hash_every: int | None  # steps
    config: dict[str, Any]  # resolved; travels in every checkpoint


def validation_due(job: Job, step: int) -> bool:
    """Tell whether to validate after `step` updates: at intervals, before a run's first step, with each checkpoint."""
    if job.run.train.validation_interval is None:
        return False
    return step % job.run.train.validation_interval == 0 or checkpoint_due(job, step)


def checkpoint_due(job: Job, step: int) -> bool:
    """Tell whether to save after `step` updates: at intervals and at the end."""
    return step > 0 and (step % job.run.train.checkpoint_interval == 0 or step == job.last_step)


class Loop:
    """Trains from where `state` stands. One object per process; rank 0's writes and shows."""

    def __init__(self, trainer: Trainer, job: Job, state: RunState, ledger: Ledger):
        self.trainer, self.job, self.state, self.ledger = trainer, job, state, ledger
        self.peak = peak_flops(trainer.ranks)
        self.feed = Feed(job.feed_source, trainer.ranks, state.step, job.last_step)
        coordinates = trainer.ranks.coordinates
        self.metrics = MetricsLog(job.run.directory) if coordinates else None
        self.chart = ChartProcess(job.run.directory) if coordinates else None
        self.bar = Progress(state.step, job.plan.steps) if coordinates else None
        self.first_step = state.step
        self.last_loss = float("nan")  # of the last logged step
        steps = range(state.step + 1, job.last_step + 1)
        self._validations = [step for step in steps if validation_due(job, step)]
        self._checkpoints = [step for step in steps if checkpoint_due(job, step)]
        self._logged_step = state.step
        self._logged_seconds = 0.0

    def train(self, numerics_changes: list[str]) -> bool:
        """Run to the last step; return False when it stopped early with a checkpoint. Raises Diverged."""
        if numerics_changes:
            self._event("numerics-drift", changes=numerics_changes)
        self._event("start", world_size=self.trainer.ranks.world_size, commit=self.job.config["git_commit"])
        if self.job.config["self_test"] is not None:
            self._event("self-test", **self.job.config["self_test"])
        try:
            if self.first_step == 0 and validation_due(self.job, 0):
                self._validate()
            for step in range(self.first_step, self.job.last_step):
                result = train_step(self.trainer, step, self.feed)
                self._finish_step(step + 1, result)
                if self.job.stop_request.agreed() and step + 1 < self.job.last_step:
                    self._stop_early()
                    return False
            self._event("end" if self.job.last_step == self.job.plan.steps else "pause")
            return True
        finally:
            self.feed.close()
            if self.bar is not None:
                self.bar.close()
            if self.metrics is not None:
                self.metrics.close()

    def _finish_step(self, step: int, result: StepResult) -> None:
        """Account for a step and do what is due after it; `step` counts the updates done."""
        job = self.job
        self.ledger.after_step()
        self.state = attrs.evolve(self.state, step=step, tokens=step * job.plan.tokens_per_step, validation_loss=None)
        if self.bar is not None:
            self.bar.advance()
        saving, validating = checkpoint_due(job, step), validation_due(job, step)
        logging = step % job.run.train.log_interval == 0 or step in (1, job.last_step)
        if logging or saving or validating or self.trainer.ranks.device.type == "cpu":
            self._check_finite()
        if logging and self.trainer.ranks.coordinates:
            self._log(result)
        if job.hash_every is not None and step % job.hash_every == 0:
            self._hash()
        if validating:
            self._validate()
        if saving:
            self._save()

    def _check_finite(self) -> None:
        problem = self.trainer.guard.problem()
        if problem is not None:
            self._event("diverged", problem=problem)
            raise Diverged(f"{problem}; the last checkpoint is as it was: {self.job.run.directory / 'checkpoints'}")

    def _log(self, result: StepResult) -> None:
        assert self.bar is not None and self.metrics is not None
        step = self.state.step
        loss, grad_norm = result.loss.item(), result.grad_norm.item()  # the one wait for the GPU
        self.last_loss = loss
        training_seconds = self.ledger.training_seconds()
        tokens = (step - self._logged_step) * self.job.plan.tokens_per_step
        tokens_per_second = tokens / (training_seconds - self._logged_seconds)
        self._logged_step, self._logged_seconds = step, training_seconds
        mfu = None
        if self.peak is not None:
            mfu = flops_per_token(self.job.run.model) * tokens_per_second / (self.peak * self.trainer.ranks.world_size)
        elapsed = self.ledger.elapsed_seconds()
        self.metrics.write(
            {
                "step": step,
                "train_loss": loss,
                "learning_rate": result.learning_rate,
                "grad_norm": grad_norm if math.isfinite(grad_norm) else None,  # fp16 overflowed: the step was skipped
                "tokens_per_second": round(tokens_per_second, 1),
                "mfu": mfu,
                "peak_memory_bytes": peak_memory_bytes(self.trainer.ranks),
                "elapsed_seconds": round(elapsed, 3),
            }
        )
        remaining = self.ledger.remaining_seconds(self._remaining())
        self.bar.show(
            Status(
                step=step,
                loss=loss,
                tokens_per_second=tokens_per_second,
                mfu=mfu,
                remaining_seconds=remaining,
                spent_usd=self._usd(elapsed),
                expected_usd=self._usd(None if remaining is None else elapsed + remaining),
            )
        )

    def _hash(self) -> None:
        digest = checkpoint.state_sha256(self.trainer, self.state.step)
        if self.metrics is not None:
            self.metrics.write({"step": self.state.step, "state_sha256": digest})

    def _validate(self) -> None:
        assert self.job.validation is not None
        with self.ledger.measure("validation"):
            loss = self.job.validation.measure(self.trainer)
        best = self.state.best_validation_loss
        saved = checkpoint_due(self.job, self.state.step)
        self.state = attrs.evolve(self.state, validation_loss=loss)
        if saved and (best is None or loss < best):
            self.state = attrs.evolve(self.state, best_step=self.state.step, best_validation_loss=loss)
        if self.bar is not None and self.metrics is not None:
            elapsed = round(self.ledger.elapsed_seconds(), 3)
            self.metrics.write({"step": self.state.step, "validation_loss": loss, "elapsed_seconds": elapsed})
            self.bar.say(f"step {self.state.step:,}: validation loss {loss:.4f}")

    def _save(self) -> None:
        began = time.perf_counter()
        with self.ledger.measure("checkpoint"):
            self.state = attrs.evolve(self.state, elapsed_seconds=self.ledger.elapsed_seconds())
            checkpoint.save(self.job.run, self.trainer, self.state, self.job.config)
        stall = round(time.perf_counter() - began, 4)
        self._event("checkpoint", name=checkpoint.name_of(self.state.step), stall_seconds=stall)
        if self.chart is not None:
            self.chart.redraw()

    def _stop_early(self) -> None:
        self._check_finite()
        if not checkpoint_due(self.job, self.state.step):
            self._save()
        self._event("stopped")

    def _event(self, event: str, **details: Any) -> None:
        if self.metrics is not None:
            moment = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            self.metrics.write({"event": event, "step": self.state.step, **details, **moment})

    def _remaining(self) -> Remaining:
        step = self.state.step
        return Remaining(
            steps=self.job.last_step - step,
            validations=len(self._validations) - bisect.bisect_left(self._validations, step),
            checkpoints=len(self._checkpoints) - bisect.bisect_left(self._checkpoints, step),
        )

    def _usd(self, seconds: float | None) -> float | None:
        if seconds is None or self.job.price_per_hour is None:
            return None
        return self.job.price_per_hour * seconds / 3600
