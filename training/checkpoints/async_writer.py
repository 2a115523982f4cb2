"""Checkpoints written behind the training: a step pays for the copy off the device, a thread does the rest.

One save is in flight at a time. All ranks' threads meet on a process group of their own, so nothing that training
waits for is delayed; the result of a save is known to all of them.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from common.errors import BadInput
from common.files import write_problem
from training.checkpoints import atomic_commit as commit
from training.checkpoints.directory import FORMAT, name_of
from training.checkpoints.tensor_files import Share
from training.parallel.process_group import Ranks, together
from training.state import Position, TrainState

SAVE_TIMEOUT = timedelta(hours=2)  # of a wait for another rank's disk


@attrs.frozen(kw_only=True)
class Saved:
    """How a save went; the same on every rank, but for the seconds."""

    position: Position
    durable: bool  # the checkpoint is on the disk, under its name
    problem: str | None  # one line; of a durable one: links or deletions that failed
    stall_seconds: float  # that training stood still
    write_seconds: float  # from the copy to the disk


class Saver:
    """Writes checkpoints of a training state. Every rank calls `begin` and `settle` at the same steps."""

    def __init__(self, directory: Path, keep: int, train_state: TrainState, ranks: Ranks, config: dict[str, Any]):
        self._directory = directory  # of all checkpoints
        self._keep = keep
        self._train_state, self._ranks = train_state, ranks
        self._config = config
        self._share = Share(train_state, ranks)
        self._group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
        self._thread: threading.Thread | None = None
        self._outcome: Saved | Exception | None = None

    def begin(self) -> None:
        """Copy the state off the device and have it written. The save before must have been settled."""
        assert self._thread is None, "one save in flight"
        began = time.perf_counter()
        self._share.copy()
        position = self._train_state.position
        state = {
            "format": FORMAT,
            **attrs.asdict(position),
            "optimizer_steps": self._train_state.optimizer.steps,
            "loss_scale": self._train_state.loss_scale.state(),
            "guard": self._train_state.guard.state(),
            "config": self._config,
        }
        stall_seconds = time.perf_counter() - began

        def work() -> None:
            try:
                durable, problem = self._write(position, state)
            except Exception as error:  # noqa: BLE001  # a rank is gone: raised where training settles the save
                self._outcome = error
                return
            self._outcome = Saved(
                position=position,
                durable=durable,
                problem=problem,
                stall_seconds=stall_seconds,
                write_seconds=time.perf_counter() - began - stall_seconds,
            )

        self._thread = threading.Thread(target=work, name="saver", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> bool:
        """True while a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def ended(self) -> Saved | None:
        """Return, without waiting, how the save in flight went, if it has come to its end on this rank."""
        if self._thread is None or self._thread.is_alive() or isinstance(self._outcome, Exception):
            return None
        return self._outcome

    def settle(self) -> Saved | None:
        """Wait for the save in flight; return how it went, or None where none was. Raises what broke the group."""
        if self._thread is None:
            return None
        began = time.perf_counter()
        self._thread.join()
        self._thread = None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        waited = time.perf_counter() - began
        return attrs.evolve(self._outcome, stall_seconds=self._outcome.stall_seconds + waited)

    def _write(self, position: Position, state: dict[str, Any]) -> tuple[bool, str | None]:
        """Return whether the checkpoint is on the disk, and what went wrong."""
        path = self._directory / name_of(position.step)
        coordinates = self._ranks.coordinates
        try:
            self._all(lambda: commit.prepare(path, self._share), only=coordinates)
            self._all(lambda: self._share.write(commit.partial_of(path)), only=True)
            commit.reached("share written")
            self._all(lambda: commit.seal(path, state), only=coordinates)
            self._all(lambda: commit.publish(path), only=coordinates)
        except BadInput as error:
            if coordinates:
                commit.discard(path)
            return False, str(error)
        try:
            self._all(lambda: self._tidy(path, position.best_step), only=coordinates)
        except BadInput as error:  # neither links nor leftovers matter to a resume
            return True, str(error)
        return True, None

    def _tidy(self, path: Path, best_step: int | None) -> None:
        commit.point(path.parent, "latest", path.name)
        # Each time, not only for a new best one: a kill may have come between that one's name and its link.
        commit.point_best(path.parent, best_step)
        commit.delete_old(path.parent, self._keep)

    def _all(self, work: Callable[[], None], *, only: bool) -> None:
        """Do a part of a save; a failure of any rank is raised on all, as BadInput."""

        def guarded() -> None:
            try:
                work()
            except OSError as error:
                problem = write_problem(error.filename or self._directory, error)
                raise BadInput(f"rank {self._ranks.rank}: {problem}") from error

        together(self._ranks, guarded, only=only, group=self._group)
