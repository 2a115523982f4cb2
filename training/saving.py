"""Saving policy: one save in flight, the best checkpoint on the disk, how long a stop with a checkpoint takes."""

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

AGAIN = "to be tried again at the next checkpoint:"


@attrs.frozen
class Saved:
    """Outcome of a save; the same on every rank, but for the seconds."""

    position: Position
    durable: bool  # the checkpoint is on the disk, under its name
    problem: BadInput | None  # of a durable one: links or deletions that failed
    stall_seconds: float  # that training stood still
    write_seconds: float  # from the copy to the disk


class Saving:
    """Saves of this job. Every rank calls `begin` and `settle` at the same steps."""

    def __init__(self, writer: CheckpointWriter, state: TrainState, reporter: Reporter, expected_seconds: float):
        self._writer, self._state, self._ledger, self._reporter = writer, state, reporter.ledger, reporter
        self.directory = writer.directory
        self._seconds = expected_seconds  # duration of the last save; of the first one, as expected
        self._thread: threading.Thread | None = None
        self._outcome: Saved | Exception | None = None
        self.newest = state.position.step or None  # step of the newest checkpoint, in flight or on the disk
        self._best = state.position.best_step, state.position.best_validation_loss  # best checkpoint on the disk
        self._reported: int | None = None  # step of the last save whose outcome was reported

    @property
    def seconds_to_stop(self) -> float:
        in_flight = self._thread is not None and self._thread.is_alive()
        return (2 if in_flight else 1) * self._seconds

    def begin(self) -> None:
        """Copy the state off the device and start writing it. The previous save must have been settled."""
        assert self._thread is None, "one save in flight"
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
                self._outcome = Saved(staged.position, durable, problem, stall_seconds, write_seconds)
            except Exception as error:  # noqa: BLE001  # a rank is gone: raised where training settles the save
                self._outcome = error

        self._thread = threading.Thread(target=work, name="saver", daemon=True)
        self._thread.start()
        self.newest = staged.position.step

    def poll(self) -> None:
        """Report the save and the uploads that have ended. Waits for nothing."""
        if self._thread is not None and not self._thread.is_alive() and isinstance(self._outcome, Saved):
            self._report(self._outcome)
        if self._writer.uploader is not None:
            for uploaded in self._writer.uploader.ended():
                event = RunEvent.UPLOAD if uploaded.problem is None else RunEvent.UPLOAD_FAILED
                consequence, seconds = f"on the disk, but NOT UPLOADED, {AGAIN}", round(uploaded.seconds, 3)
                self._record(step_of(uploaded.name), event, uploaded.problem, consequence, seconds=seconds)

    def finish_upload(self) -> None:
        """Wait until the newest checkpoint is in the bucket, or has failed to be. After the last `settle`."""
        if self._writer.uploader is not None:
            with self._ledger.measure("checkpoints", counts=False):
                self._writer.uploader.finish(self._writer.newest)
        self.poll()

    def settle(self, *, required: bool = False) -> None:
        """Wait until the save in flight has ended. Raises what broke it, and BadInput where a required one failed."""
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
        saved = attrs.evolve(self._outcome, stall_seconds=self._outcome.stall_seconds + waited)
        if saved.durable:
            self._best = saved.position.best_step, saved.position.best_validation_loss
        else:
            step, loss = self._best
            self._state.position = attrs.evolve(self._state.position, best_step=step, best_validation_loss=loss)
        self._report(saved)
        if required and not saved.durable:
            raise BadInput(
                f"{saved.problem}; the last steps are not saved, older checkpoints are as they were: fix this, then "
                "rerun the same command",
                reason="user-error" if saved.problem is None else saved.problem.reason,
            )

    def _report(self, saved: Saved) -> None:
        self._seconds = saved.stall_seconds + saved.write_seconds
        step = saved.position.step
        if step == self._reported:
            return
        self._reported = step
        details = {"stall_seconds": round(saved.stall_seconds, 4), "write_seconds": round(saved.write_seconds, 3)}
        consequence = "saved, but" if saved.durable else f"NOT SAVED, {AGAIN}"
        event = RunEvent.CHECKPOINT if saved.durable else RunEvent.CHECKPOINT_FAILED
        problem = None if saved.problem is None else str(saved.problem)
        self._record(step, event, problem, consequence, **details)

    def _record(self, step: int, event: str, problem: str | None, consequence: str, **details: float) -> None:
        """Record the outcome of a save or an upload as an event; print a problem, after its consequence."""
        fields = {Detail.NAME: name_of(step), **details} | ({} if problem is None else {Detail.PROBLEM: problem})
        self._reporter.event(step, event, **fields)
        if problem is not None:
            show(warning(f"step {step:,}: {consequence} {problem}"), once=True)
