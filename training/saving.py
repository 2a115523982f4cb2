"""Saving policy: one save in flight, the best checkpoint on the disk, how long a stop with a checkpoint takes."""

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from common.errors import BadInput
from training.checkpoints.directory import name_of
from training.checkpoints.writer import Saved, Saver
from training.state import TrainState
from training.telemetry.reporter import Reporter
from training.telemetry.time_ledger import TimeLedger

if TYPE_CHECKING:
    from training.checkpoints.bucket_upload import UploadOutcome


class Saving:
    """Saves of this job. Every rank calls `begin` and `settle` at the same steps."""

    def __init__(
        self, saver: Saver, state: TrainState, ledger: TimeLedger, reporter: Reporter, expected_seconds: float
    ):
        """`expected_seconds`: of the first save."""
        self._saver, self._state, self._ledger, self._reporter = saver, state, ledger, reporter
        self._seconds = expected_seconds  # duration of the last save; of the first one, as expected
        self.newest = state.position.step or None  # step of the newest checkpoint, in flight or on the disk
        self._best = state.position.best_step, state.position.best_validation_loss  # best checkpoint on the disk
        self._reported: int | None = None  # step of the last save whose outcome was reported

    @property
    def directory(self) -> Path:
        return self._saver.directory

    @property
    def seconds_to_stop(self) -> float:
        return (2 if self._saver.in_flight else 1) * self._seconds

    def begin(self) -> None:
        """Copy the state off the device and start writing it. The previous save must have been settled."""
        with self._ledger.measure("checkpoints"):
            elapsed = self._ledger.elapsed_seconds()
            self._state.position = attrs.evolve(self._state.position, elapsed_seconds=elapsed)
            self._saver.begin()
        self.newest = self._state.position.step

    def poll(self) -> None:
        """Report the save and the upload in flight if they have ended. Waits for nothing."""
        self._report(self._saver.ended())
        for uploaded in self._saver.uploads():
            self._report_upload(uploaded)

    def finish_upload(self) -> None:
        """Wait for the upload of the newest checkpoint, where the run has a bucket. After the last `settle`."""
        with self._ledger.measure("checkpoints", counts=False):
            self._saver.finish_upload()
        self.poll()

    def settle(self, *, required: bool = False) -> None:
        """Wait until the save in flight has ended. Raises BadInput where a required one has failed."""
        with self._ledger.measure("checkpoints", counts=False):
            saved = self._saver.settle()
        if saved is None:
            return
        if saved.durable:
            self._best = saved.position.best_step, saved.position.best_validation_loss
        else:
            step, loss = self._best
            self._state.position = attrs.evolve(self._state.position, best_step=step, best_validation_loss=loss)
        self._report(saved)
        if required and not saved.durable:
            raise BadInput(
                f"{saved.problem}; the last steps are not saved, older checkpoints are as they were: fix this, then "
                "rerun the same command"
            )

    def _report(self, saved: Saved | None) -> None:
        if saved is None:
            return
        self._seconds = saved.stall_seconds + saved.write_seconds
        step = saved.position.step
        if step == self._reported:
            return
        self._reported = step
        details = {"stall_seconds": round(saved.stall_seconds, 4), "write_seconds": round(saved.write_seconds, 3)}
        problem = {} if saved.problem is None else {"problem": saved.problem}
        event = "checkpoint" if saved.durable else "checkpoint-failed"
        self._reporter.event(step, event, name=name_of(step), **details, **problem)
        if saved.problem is not None:
            outcome = "saved, but" if saved.durable else "NOT SAVED, to be tried again at the next checkpoint:"
            self._reporter.say(f"WARNING: step {step:,}: {outcome} {saved.problem}")

    def _report_upload(self, uploaded: "UploadOutcome") -> None:
        step, seconds = int(uploaded.name.rpartition("-")[2]), round(uploaded.seconds, 3)
        if uploaded.problem is None:
            self._reporter.event(step, "upload", name=uploaded.name, seconds=seconds)
        else:
            self._reporter.event(step, "upload-failed", name=uploaded.name, seconds=seconds, problem=uploaded.problem)
            self._reporter.say(
                f"WARNING: step {step:,}: on the disk, but NOT UPLOADED, to be tried again at the next checkpoint: "
                f"{uploaded.problem}"
            )
