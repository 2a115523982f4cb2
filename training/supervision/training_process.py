"""A training job as a subprocess, which does not outlive the command that started it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from common.errors import EXIT_DONE, EXIT_ERROR, Reason
from common.files import writing
from common.json_files import open_descriptor, open_regular
from common.launch import JOB_VARIABLE, without_launcher
from training.supervision.run_lock import EXIT_FILE, read_exit

JOB_LOG = "train.log"  # output of all jobs, in the run directory
LOG_TAIL_BYTES = 1 << 16
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


class JobEnd(NamedTuple):
    """How a job ended."""

    status: int  # EXIT_ERROR if the job was killed
    reason: Reason | None  # None if the job left no record, or if an earlier version wrote the record
    problem: str  # why the job failed, for people


class TrainingProcess:
    def __init__(self, directory: Path, command: list[str], environment: Mapping[str, str]):
        """Start Python with the arguments in `command`.

        The new process gets a session of its own, so that Ctrl-C in a terminal reaches only this process. This process
        then asks the new one to stop.
        """
        path = self.log = directory / JOB_LOG
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with writing(path), os.fdopen(open_descriptor(path, flags), "ab") as log:
            self._log_start = log.tell()
            self._job, self._record_before = uuid4().hex, _version(directory / EXIT_FILE)
            self._process = subprocess.Popen(
                [sys.executable, *command],
                env={**without_launcher(), **environment, JOB_VARIABLE: self._job},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_stop_with_parent(),  # noqa: PLW1509  # it needs no lock that other threads may hold
            )
        self._directory = directory

    def end(self) -> JobEnd | None:
        """Return how the job ended; None while it runs.

        torchrun reports every failure as status 1, so the status in the job's exit.json is used if that file exists.
        """
        code = self._process.poll()
        if code is None:
            return None
        ended = None if code == EXIT_DONE else read_exit(self._directory)
        if ended is not None and (ended.job == self._job or (ended.job is None and self._is_new_record())):
            return JobEnd(ended.status, ended.reason, ended.problem or self._last_line())
        if code < 0:
            memory = " (out of memory?)" if -code == signal.SIGKILL else ""
            return JobEnd(EXIT_ERROR, None, f"killed by {signal.Signals(-code).name}{memory}")
        return JobEnd(code, None, self._last_line())

    def _is_new_record(self) -> bool:
        """Return whether exit.json has been written since this job started.

        This is needed for records of an earlier version of train.py, which do not name their job.
        """
        return _version(self._directory / EXIT_FILE) != self._record_before

    def ask_to_stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the job and its ranks, and wait until it has ended. The last checkpoint does not change."""
        pid = self._process.pid
        with suppress(OSError):  # the process has ended, or there is no /proc
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(int(child), signal.SIGKILL)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _last_line(self) -> str:
        """Return the last line of this job's output that has a letter or digit; used if exit.json names no problem."""
        text = b""
        with suppress(OSError), open_regular(self.log) as log:  # the log may have been removed
            log.seek(max(self._log_start, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            text = log.read()
        lines = [line.strip() for line in text.decode(errors="replace").splitlines() if any(map(str.isalnum, line))]
        return lines[-1] if lines else "it printed nothing"


def _version(path: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever a file is replaced or written; None if there is no file."""
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def _stop_with_parent() -> Callable[[], None] | None:
    """Return a function to call in a new process. The new process then receives SIGTERM when this process is killed.

    On SIGTERM, the new process saves a checkpoint and ends.
    """
    if sys.platform != "linux":
        return None
    parent, system = os.getpid(), ctypes.CDLL(None)

    def prepare() -> None:
        # The parent's handler would swallow a SIGTERM that arrives before the new program begins.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        system.prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(EXIT_ERROR)

    return prepare
