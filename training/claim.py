"""One job at a time trains a run, and a file says how the last one ended."""

import fcntl
import json
import time
from pathlib import Path
from typing import TextIO

from errors import EXIT_DIVERGED, EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, BadInput

EXIT_FILE, LOCK_FILE = "exit.json", ".lock"
LOCK_SECONDS = 30.0  # to wait for a job that is about to end
OUTCOMES = {EXIT_DONE: "done", EXIT_ERROR: "error", EXIT_DIVERGED: "diverged", EXIT_STOPPED: "stopped"}


class Claim:
    """A job's claim on a run directory, for as long as its process lives. Rank 0's."""

    def __init__(self, run_directory: Path):
        """Take it. Raises BadInput when another job has it."""
        self._directory = run_directory
        try:
            self._file = (run_directory / LOCK_FILE).open("w")
        except OSError as error:
            raise BadInput(f"{run_directory}: cannot be written: {error}; checkpoints and metrics go there") from error
        _lock(self._file, run_directory)
        (run_directory / EXIT_FILE).unlink(missing_ok=True)

    def end(self, status: int) -> None:
        """Write `exit.json`. Where a job has ended without one, it was killed."""
        partial = self._directory / f".partial-{EXIT_FILE}"
        ending = {"status": status, "outcome": OUTCOMES[status], "time": utc_now()}
        try:
            partial.write_text(json.dumps(ending) + "\n")
            partial.replace(self._directory / EXIT_FILE)
        except OSError as error:  # a full disk: the exit status still tells
            print(f"WARNING: {self._directory / EXIT_FILE}: {error}", flush=True)


def utc_now() -> str:
    """Return date and time in UTC, ISO 8601, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _lock(file: TextIO, run_directory: Path) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise BadInput(f"{run_directory}: another job trains this run; wait for it, or stop it") from None
            time.sleep(0.2)
        except OSError as error:  # a file system without locks
            print(f"NOTE: {file.name}: cannot be locked ({error}); see that no other job trains this run", flush=True)
            return
