"""Asynchronous checkpoint writer: training waits for the copy off the device, a thread writes it.

One save is in flight at a time. All ranks' threads meet on a process group of their own, so nothing that training
waits for is delayed; the result of a save is known to all of them.
"""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attrs
import torch.distributed as dist

from common.errors import BadInput
from common.files import write_problem
from training.checkpoints.atomic_commit import (
    create_partial,
    discard,
    prune_checkpoints,
    publish,
    write_state_and_manifest,
)
from training.checkpoints.directory import name_of
from training.checkpoints.node_disks import NodeDisks
from training.checkpoints.run_record import RunRecord
from training.checkpoints.saved_state import SavedState
from training.checkpoints.tensor_files import StateShard
from training.parallel.process_group import SAVE_TIMEOUT, together
from training.state import Position, TrainState

if TYPE_CHECKING:
    from training.checkpoints.bucket_upload import Uploader, UploadOutcome

Value = TypeVar("Value")


@attrs.frozen
class Saved:
    """Outcome of a save; the same on every rank, but for the seconds."""

    position: Position
    durable: bool  # the checkpoint is on the disk, under its name
    problem: str | None  # one line; of a durable one: links or deletions that failed
    stall_seconds: float  # that training stood still
    write_seconds: float  # from the copy to the disk


class Saver:
    """Writes checkpoints of a training state. Every rank calls `begin` and `settle` at the same steps."""

    def __init__(
        self, directory: Path, uploader: "Uploader | None", train_state: TrainState, disks: NodeDisks, config: RunRecord
    ):
        """`uploader`: to a bucket, besides."""
        self.directory, self._uploader = directory, uploader
        self._train_state, self._disks, self._config = train_state, disks, config
        self._shard = StateShard(train_state, disks)
        self._group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
        self._thread: threading.Thread | None = None
        self._outcome: Saved | Exception | None = None
        self._newest: Path | None = None  # durable one of this job

    def begin(self) -> None:
        """Copy the state off the device and start writing it. The previous save must have been settled."""
        assert self._thread is None, "one save in flight"
        began = time.perf_counter()
        self._shard.stage()
        state = SavedState(
            position=self._train_state.position,
            optimizer_steps=self._train_state.optimizer.steps,
            loss_scale=self._train_state.loss_scale.state(),
            config=self._config,
        )
        stall_seconds = time.perf_counter() - began

        def work() -> None:
            try:
                durable, problem = self._write(state)
                write_seconds = time.perf_counter() - began - stall_seconds
                self._outcome = Saved(state.position, durable, problem, stall_seconds, write_seconds)
            except Exception as error:  # noqa: BLE001  # a rank is gone: raised where training settles the save
                self._outcome = error

        self._thread = threading.Thread(target=work, name="saver", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def ended(self) -> Saved | None:
        """Return, without waiting, the outcome of the save in flight, if it has ended on this rank."""
        if self._thread is None or self._thread.is_alive() or isinstance(self._outcome, Exception):
            return None
        return self._outcome

    def settle(self) -> Saved | None:
        """Wait for the save in flight; return its outcome, or None where none was. Raises what broke the group."""
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

    def uploads(self) -> "Iterable[UploadOutcome]":
        """Return, without waiting, the outcomes of uploads to a bucket that were not returned yet."""
        return () if self._uploader is None else self._uploader.ended()

    def finish_upload(self) -> None:
        """Wait until the newest checkpoint of this job is in the bucket, or has failed to be. After `settle`."""
        if self._uploader is not None:
            self._uploader.finish(self._newest)

    def _write(self, state: SavedState) -> tuple[bool, str | None]:
        """Return whether the checkpoint is durable, and the problem if not."""
        path, keeps, ranks = self.directory / name_of(state.position.step), self._disks.keeps, self._disks.ranks
        if not self._disks.shared:  # the same file everywhere, though clocks differ
            [state] = together(ranks, lambda: state, only=ranks.coordinates, group=self._group)
        try:
            self._all(lambda: create_partial(path, self._shard.files), only=keeps)
            told = self._all(lambda: self._shard.write(path, self._group), only=True)
            shares = self._disks.of_own_disk(told)
            written = {file: [piece for share in shares for piece in share[file]] for file in self._shard.files}
            self._all(lambda: write_state_and_manifest(path, state, written), only=keeps)
            self._all(lambda: publish(path), only=keeps)
        except BadInput as error:
            if keeps:
                discard(path)
            return False, str(error)
        problem = None
        try:
            best, keep = state.position.best_step, self._config.train["keep_checkpoints"]
            self._all(lambda: prune_checkpoints(self.directory, path.name, best, keep), only=keeps)
        except BadInput as error:  # a resume needs neither the links nor the deletions
            problem = str(error)
        self._newest = path
        if self._uploader is not None:
            self._uploader.offer(path)
        return True, problem

    def _all(self, work: Callable[[], Value], *, only: bool) -> list[Value]:
        """Do a part of a save; return each rank's value. A failure of any rank is raised on all, as BadInput."""

        def guarded() -> Value:
            try:
                return work()
            except Exception as error:  # a rank that is gone breaks the group's next collective, too
                problem = f"{type(error).__name__}: {error}"
                if isinstance(error, OSError):
                    problem = write_problem(error.filename or self.directory, error)
                raise BadInput(f"rank {self._disks.ranks.rank}: {problem}") from error

        return together(self._disks.ranks, guarded, only=only, group=self._group)
