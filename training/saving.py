"""The policy for saves: only one save is in flight at a time, and only a checkpoint on the disk can be the best one.

This module also estimates how long it takes to stop with a checkpoint.
"""

import threading
import time

import attrs

from common.errors import BadInput
from common.output import show, warning
from training.checkpoints.directory import name_of, step_of
from training.checkpoints.writer import CheckpointWriter
from training.state import Position, TrainState
from training.telemetry.metrics_log import Detail, RunEvent
from training.telemetry.reporter import Reporter

RETRY = "to be tried again at the next checkpoint:"


@attrs.frozen
class SaveOutcome:
    """Outcome of a save. It is the same on every rank, except for the seconds."""

    position: Position
    durable: bool  # the checkpoint is on the disk, under its final name
    problem: BadInput | None  # why the save failed or, if the checkpoint is durable, which link or deletion failed
    stall_seconds: float  # time for which training had to wait
    write_seconds: float  # from the end of the copy until the checkpoint is on the disk


class Saving:
    """The saves of this job. Every rank calls `begin` and `settle` at the same steps."""

    def __init__(self, writer: CheckpointWriter, state: TrainState, reporter: Reporter, expected_seconds: float):
        self._writer, self._state, self._ledger, self._reporter = writer, state, reporter.ledger, reporter
        self.directory = writer.directory
        self._seconds = expected_seconds  # duration of the last save; before the first save, the expected duration
        self._thread: threading.Thread | None = None
        self._outcome: SaveOutcome | Exception | None = None
        self.newest = state.position.step or None  # step of the newest checkpoint, in flight or on the disk
        # Step and loss of the best checkpoint on the disk
        self._best = state.position.best_step, state.position.best_validation_loss
        self._reported: int | None = None  # step of the last save whose outcome was reported

    @property
    def seconds_to_stop(self) -> float:
        """Expected seconds to stop with a checkpoint, including the rest of a save that is in flight."""
        in_flight = self._thread is not None and self._thread.is_alive()
        return (2 if in_flight else 1) * self._seconds

    def begin(self) -> None:
        """Copy the state off the device and start writing it. The previous save must have been settled."""
        assert self._thread is None, "a save is still in flight"
        with self._ledger.measure("checkpoints"):
            elapsed = self._ledger.elapsed_seconds()
            self._state.position = attrs.evolve(self._state.position, elapsed_seconds=elapsed)
            began = time.perf_counter()
            staged = self._writer.stage()
            stall_seconds = time.perf_counter() - began

        def work() -> None:
            try:
                durable, problem = self._writer.write(staged)
                write_seconds = time.perf_counter() - began - stall_seconds
                self._outcome = SaveOutcome(staged.position, durable, problem, stall_seconds, write_seconds)
            except Exception as error:  # noqa: BLE001  # a rank has died; `settle` raises this in the training thread
                self._outcome = error

        self._thread = threading.Thread(target=work, name="saver", daemon=True)
        self._thread.start()
        self.newest = staged.position.step

    def poll(self) -> None:
        """Report the save and the uploads that have ended, without waiting for the rest."""
        if self._thread is not None and not self._thread.is_alive() and isinstance(self._outcome, SaveOutcome):
            self._report(self._outcome)
        if self._writer.uploader is not None:
            for upload in self._writer.uploader.ended():
                event = RunEvent.UPLOAD if upload.problem is None else RunEvent.UPLOAD_FAILED
                consequence, seconds = f"saved on the disk, but NOT UPLOADED, {RETRY}", round(upload.seconds, 3)
                self._record(step_of(upload.name), event, upload.problem, consequence, seconds=seconds)

    def finish_upload(self) -> None:
        """Wait until the newest checkpoint is in the bucket, or its upload has failed; call it after all saves."""
        if self._writer.uploader is not None:
            with self._ledger.measure("checkpoints", counts=False):
                self._writer.uploader.finish(self._writer.newest)
        self.poll()

    def settle(self, *, required: bool = False) -> None:
        """Wait until the save in flight has ended.

        Raises the exception that ended the save early, or BadInput if a `required` checkpoint was not saved.
        """
        if self._thread is None:
            return
        began = time.perf_counter()
        with self._ledger.measure("checkpoints", counts=False):
            self._thread.join()
        self._thread = None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        waited = time.perf_counter() - began
        outcome = attrs.evolve(self._outcome, stall_seconds=self._outcome.stall_seconds + waited)
        if outcome.durable:
            self._best = outcome.position.best_step, outcome.position.best_validation_loss
        else:
            step, loss = self._best
            self._state.position = attrs.evolve(self._state.position, best_step=step, best_validation_loss=loss)
        self._report(outcome)
        if required and not outcome.durable:
            raise BadInput(
                f"{outcome.problem}; the last steps are not saved, but older checkpoints are unchanged. Fix the "
                "problem, then run the same command again",
                reason="user-error" if outcome.problem is None else outcome.problem.reason,
            )

    def _report(self, outcome: SaveOutcome) -> None:
        self._seconds = outcome.stall_seconds + outcome.write_seconds
        step = outcome.position.step
        if step == self._reported:
            return
        self._reported = step
        details = {"stall_seconds": round(outcome.stall_seconds, 4), "write_seconds": round(outcome.write_seconds, 3)}
        consequence = "saved, but" if outcome.durable else f"NOT SAVED, {RETRY}"
        event = RunEvent.CHECKPOINT if outcome.durable else RunEvent.CHECKPOINT_FAILED
        problem = None if outcome.problem is None else str(outcome.problem)
        self._record(step, event, problem, consequence, **details)

    def _record(self, step: int, event: str, problem: str | None, consequence: str, **details: float) -> None:
        """Record the outcome of a save or an upload as an event, and print its consequence if there was a problem."""
        fields = {Detail.NAME: name_of(step), **details} | ({} if problem is None else {Detail.PROBLEM: problem})
        self._reporter.event(step, event, **fields)
        if problem is not None:
            show(warning(f"step {step:,}: {consequence} {problem}"), once=True)
