"""Run lock: `.lock` in the run directory, held by rank 0 of the one job that trains there.

The file also holds torchrun's name of the job, followed by RESUMED once the job has done what --resume asked: for the
groups of ranks that torchrun may restart later in the same job.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import attrs

from common.file_lock import lock
from common.files import writing
from common.json_files import open_descriptor
from training.launch import restarts, torchrun_job

LOCK_FILE = ".lock"
LOCK_CHARACTERS = 1000  # more than is ever written there
LOCK_SECONDS = 30.0  # to wait for a job that is about to end
RESUMED = "resumed"


@attrs.frozen
class RunLock:
    """The lock of one process, held until it ends. Without a file, the null form: of ranks other than 0."""

    file: TextIO | None = None
    restarted: bool = False  # an earlier group of ranks of this job has held it
    resumed: bool = False  # that group had done what --resume asked

    def write_job(self) -> None:
        """Write the job's name, unless an earlier group has."""
        if not self.restarted:
            self._write(_job())

    def write_resumed(self) -> None:
        """Write that the job has done what --resume asked."""
        self._write(f"{_job()} {RESUMED}")

    def _write(self, text: str) -> None:
        if self.file is None:
            return
        with suppress(OSError):  # a full disk: a restarted group then obeys --resume again, and archives what it moves
            self.file.truncate(0)
            self.file.write(text)
            self.file.flush()


def take_run_lock(run_directory: Path, *, wait_seconds: float = LOCK_SECONDS) -> RunLock:
    """Lock a run directory. Raises BadInput when another job holds the lock after `wait_seconds`."""
    path = run_directory / LOCK_FILE
    with writing(path):
        file = os.fdopen(open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+")
    contention = f"{run_directory}: another job trains this run; wait for it, or stop it"
    lock(file, path, contention, wait_seconds=wait_seconds)
    file.seek(0)
    words = file.read(LOCK_CHARACTERS).split()
    restarted = restarts() > 0 and words[:1] == [_job()]
    return RunLock(file, restarted, restarted and RESUMED in words)


def _job() -> str:
    return torchrun_job() or "alone"
