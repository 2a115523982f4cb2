"""Run lock: `.lock` in the run directory, held by rank 0 of the one job that trains there.

The file also holds who that job is, for the groups of ranks that torchrun may start later in the same job: after a
failure, or because a node has come or gone. A job is the same while one of its torchruns lives.
"""

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import attrs

from common.file_lock import is_held, open_locked
from common.json_files import parse_json
from training.launch import environment_nodes, restarts, torchrun_identity
from training.supervision.exit_record import EXIT_FILE

LOCK_FILE = ".lock"
LOCK_CHARACTERS = 1 << 20  # more than is ever written there
LOCK_SECONDS = 30.0  # to wait for a job that is about to end


@attrs.frozen(kw_only=True)
class LockHolder:
    """A group of ranks, as the lock file has it."""

    nodes: int
    torchruns: Collection[str]  # launch.torchrun_identity of each
    resumed: bool = False  # it has done what --resume asked


class RunLock:
    """The lock of one process, held until it ends. Without a file, the null form: of ranks other than 0."""

    def __init__(self, file: TextIO | None = None, before: LockHolder | None = None):
        self.file = file
        self.resumed = False  # this job has done what --resume asked; known once the ranks have met
        self._before = before  # what has held it last, in this job or another
        self._torchruns: list[str] = []

    @property
    def restarted(self) -> bool:
        """True if this rank's torchrun has restarted a group that held it, on as many nodes."""
        before = self._before
        if before is None or restarts() == 0:
            return False
        return torchrun_identity() in before.torchruns and before.nodes == environment_nodes()

    def write_job(self, torchruns: Collection[str]) -> None:
        """Write the holder, once the ranks have met. `torchruns`: those that have started them."""
        before, self._torchruns = self._before, sorted(torchruns)
        self.resumed = before is not None and before.resumed and not set(before.torchruns).isdisjoint(torchruns)
        self._write()

    def write_resumed(self) -> None:
        """Write that the job has done what --resume asked."""
        self.resumed = True
        self._write()

    def _write(self) -> None:
        if self.file is None:
            return
        holder = LockHolder(nodes=environment_nodes(), torchruns=self._torchruns, resumed=self.resumed)
        with suppress(OSError):  # a full disk: a restarted group then obeys --resume again, and archives what it moves
            self.file.truncate(0)
            self.file.write(json.dumps(attrs.asdict(holder)))
            self.file.flush()


def take_run_lock(run_directory: Path, *, wait_seconds: float = LOCK_SECONDS) -> RunLock:
    """Lock a run directory. Raises BadInput when another job holds the lock after `wait_seconds`."""
    contention = f"{run_directory}: another job trains this run; wait for it, or stop it"
    file = open_locked(run_directory / LOCK_FILE, contention, wait_seconds=wait_seconds)
    file.seek(0)
    return RunLock(file, _parsed(file.read(LOCK_CHARACTERS)))


def is_locked(run_directory: Path) -> bool:
    """Tell whether a job trains a run; where the file system has no locks, whether it has left no exit record."""
    held = lock_is_held(run_directory)
    return not (run_directory / EXIT_FILE).exists() if held is None else held


def lock_is_held(run_directory: Path) -> bool | None:
    """Tell whether a job holds the run lock; None where the file system has no locks."""
    return is_held(run_directory / LOCK_FILE, absent=False)


def _parsed(text: str) -> LockHolder | None:
    """Return the holder; None for an empty file, and one that was torn or damaged."""
    with suppress(ValueError, TypeError):
        holder = LockHolder(**parse_json(text))
        if type(holder.nodes) is int and all(isinstance(one, str) for one in holder.torchruns):
            return holder
    return None
