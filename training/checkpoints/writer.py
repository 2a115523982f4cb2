"""Checkpoint writer: it copies the state off the device, writes, links and uploads it, and removes old checkpoints.

Training waits only for the copy. The threads that save on all ranks use a separate process group, so that they never
delay a collective for which training waits. All ranks learn the outcome of a save.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from common.errors import BadInput, Reason, reason_of_system_error
from common.files import write_problem
from training.checkpoints.atomic_commit import create_partial, publish, write_state_and_manifest
from training.checkpoints.directory import name_of
from training.checkpoints.retention import discard, prune_disk
from training.checkpoints.run_record import RunRecord
from training.checkpoints.saved_state import SavedState
from training.checkpoints.tensor_files import StateShard
from training.parallel.process_group import SAVE_TIMEOUT, Value, from_coordinator, members, together

if TYPE_CHECKING:
    from training.checkpoints.bucket_upload import Uploader


class CheckpointWriter:
    """Writes checkpoints of a training state. Every rank calls `stage` and `write` for the same steps."""

    def __init__(self, directory: Path, uploader: "Uploader | None", shard: StateShard, config: RunRecord):
        self.directory, self.uploader = directory, uploader
        self._shard, self._config = shard, config
        self._leads = shard.disk.rank == 0  # whether this rank does the work that is done once per disk
        self._group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
        self.newest: Path | None = None  # the newest durable checkpoint of this job

    def stage(self) -> SavedState:
        """Copy the state off the device; return everything except the tensors."""
        self._shard.stage()
        state = self._shard.state
        return SavedState(
            position=state.position,
            optimizer_steps=state.optimizer.steps,
            loss_scale=state.loss_scale.state(),
            config=self._config,
        )

    def write(self, state: SavedState) -> tuple[bool, BadInput | None]:
        """Write the staged state; return whether the checkpoint is durable under its name, and a problem or None.

        A durable checkpoint can still have a problem: links could not be set, or old checkpoints could not be removed.
        Raises the error of a broken process group.
        """
        path, ranks, disk = self.directory / name_of(state.position.step), self._shard.ranks, self._shard.disk
        if disk.size < ranks.world_size:  # the nodes' clocks differ, but every disk must get the same file
            state = from_coordinator(ranks, lambda: state, group=self._group)
        try:
            self._all(lambda: create_partial(path, self._shard.sizes), only=self._leads)
            pieces_by_rank = self._all(lambda: self._shard.write(path, self._group), only=True)
            disk_pieces = [pieces_by_rank[rank] for rank in members(ranks, disk)]
            pieces = {file: [piece for files in disk_pieces for piece in files[file]] for file in self._shard.sizes}
            self._all(lambda: write_state_and_manifest(path, state, pieces), only=self._leads)
            self._all(lambda: publish(path), only=self._leads)
        except BadInput as error:
            if self._leads:
                discard(path)
            return False, error
        problem = None
        try:
            best, keep = state.position.best_step, self._config.train.checkpoints.keep_checkpoints
            self._all(lambda: prune_disk(self.directory, state.position.step, best, keep), only=self._leads)
        except BadInput as error:  # a resume depends neither on the links nor on the removal of old checkpoints
            problem = error
        self.newest = path
        if self.uploader is not None:
            self.uploader.offer(path)
        return True, problem

    def _all(self, work: Callable[[], Value], *, only: bool) -> list[Value]:
        """Do one part of a save; return each rank's value. A failure on any rank is raised on all ranks as BadInput."""

        def guarded() -> Value:
            reason: Reason
            try:
                return work()
            except Exception as error:  # if another rank has died, the group's next collective fails as well
                problem, reason = f"{type(error).__name__}: {error}", "crash"
                if isinstance(error, OSError):
                    problem = write_problem(error.filename or self.directory, error)
                    reason = reason_of_system_error(error)
                raise BadInput(f"rank {self._shard.ranks.rank}: {problem}", reason=reason) from error

        return together(self._shard.ranks, guarded, only=only, group=self._group)
