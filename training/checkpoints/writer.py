"""Checkpoint writer: the state is copied off the device, then written, linked and uploaded, older ones deleted.

Training waits for the copy alone. All ranks' threads meet on a process group of their own, so nothing that training
waits for is delayed; the result of a save is known to all of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from common.errors import BadInput, Reason, reason_of_system_error
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
from training.parallel.process_group import SAVE_TIMEOUT, Value, from_coordinator, together
from training.state import TrainState

if TYPE_CHECKING:
    from training.checkpoints.bucket_upload import Uploader


class CheckpointWriter:
    """Writes checkpoints of a training state. Every rank calls `stage` and `write` for the same steps."""

    def __init__(
        self, directory: Path, uploader: "Uploader | None", train_state: TrainState, disks: NodeDisks, config: RunRecord
    ):
        self.directory, self.uploader = directory, uploader
        self._train_state, self._disks, self._config = train_state, disks, config
        self._shard = StateShard(train_state, disks)
        self._group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
        self.newest: Path | None = None  # durable one of this job

    def stage(self) -> SavedState:
        """Copy the state off the device; return all of it but the tensors."""
        self._shard.stage()
        return SavedState(
            position=self._train_state.position,
            optimizer_steps=self._train_state.optimizer.steps,
            loss_scale=self._train_state.loss_scale.state(),
            config=self._config,
        )

    def write(self, state: SavedState) -> tuple[bool, BadInput | None]:
        """Write the staged state; return whether it is durable under its name, and a problem.

        Of a durable one: links or deletions that failed. Raises what broke the group.
        """
        path, keeps, ranks = self.directory / name_of(state.position.step), self._disks.keeps, self._disks.ranks
        if not self._disks.shared:  # the same file everywhere, though clocks differ
            state = from_coordinator(ranks, lambda: state, group=self._group)
        try:
            self._all(lambda: create_partial(path, self._shard.sizes), only=keeps)
            told = self._all(lambda: self._shard.write(path, self._group), only=True)
            shares = self._disks.of_own_disk(told)
            written = {file: [piece for share in shares for piece in share[file]] for file in self._shard.sizes}
            self._all(lambda: write_state_and_manifest(path, state, written), only=keeps)
            self._all(lambda: publish(path), only=keeps)
        except BadInput as error:
            if keeps:
                discard(path)
            return False, error
        problem = None
        try:
            best, keep = state.position.best_step, self._config.train.checkpoints.keep_checkpoints
            self._all(lambda: prune_checkpoints(self.directory, path.name, best, keep), only=keeps)
        except BadInput as error:  # a resume needs neither the links nor the deletions
            problem = error
        self.newest = path
        if self.uploader is not None:
            self.uploader.offer(path)
        return True, problem

    def _all(self, work: Callable[[], Value], *, only: bool) -> list[Value]:
        """Do a part of a save; return each rank's value. A failure of any rank is raised on all, as BadInput."""

        def guarded() -> Value:
            reason: Reason
            try:
                return work()
            except Exception as error:  # a rank that is gone breaks the group's next collective, too
                problem, reason = f"{type(error).__name__}: {error}", "crash"
                if isinstance(error, OSError):
                    problem = write_problem(error.filename or self.directory, error)
                    reason = reason_of_system_error(error)
                raise BadInput(f"rank {self._disks.ranks.rank}: {problem}", reason=reason) from error

        return together(self._disks.ranks, guarded, only=only, group=self._group)
