"""One job at a time trains a run, and a file says how the last one ended."""

import fcntl
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from common.clock import utc_now
from common.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, BadInput, printable
from common.files import replace_file, write_error, writing
from common.json_files import open_descriptor, read_json
from training.launch import restarts

EXIT_FILE, LOCK_FILE = "exit.json", ".lock"
LOCK_CHARACTERS = 1000  # more than is ever written there
LOCK_SECONDS = 30.0  # to wait for a job that is about to end
ERROR = "error"
LOST = "lost"  # another rank was killed, froze or hung; EXIT_ERROR as well
OUTCOMES = {EXIT_DONE: "done", EXIT_ERROR: ERROR, EXIT_DIVERGED: "diverged", EXIT_STOPPED: "stopped"}
RESUMED = "resumed"  # in the lock file, after torchrun's name for the job


class Claim:
    """A job's claim on a run directory, for as long as its process lives. Rank 0's.

    The lock file names torchrun's job, for the next group of ranks that it may start: `resumed` tells that an earlier
    group of this job had done what --resume asked, `ending` that it had stopped or diverged: the status to end with.
    """

    def __init__(self, run_directory: Path):
        """Take it. Raises BadInput when another job has it."""
        self._directory = run_directory
        with writing(run_directory / LOCK_FILE):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            self._file = os.fdopen(open_descriptor(run_directory / LOCK_FILE, flags), "a+")
        _lock(self._file, run_directory)
        self._ended = False
        self._file.seek(0)
        before = self._file.read(LOCK_CHARACTERS).split()
        again = restarts() > 0 and before[:1] == [_job()]
        self.resumed = again and RESUMED in before
        self.ending = _final_status(run_directory) if again else None
        if self.ending is None:
            with writing(run_directory / EXIT_FILE):
                (run_directory / EXIT_FILE).unlink(missing_ok=True)
        if not again:
            self._note(_job())

    def resume_done(self) -> None:
        """Note for later groups of this job that what --resume asked is done."""
        self._note(f"{_job()} {RESUMED}")

    def end(self, status: int, outcome: str | None = None, *, final: bool = True) -> None:
        """Write `exit.json`, once. Where a job has ended without one, all of it was killed.

        Not `final`: a stop that may have been torchrun's own, after another rank's death. A restarted group goes on.
        """
        if self._ended or self.ending is not None:
            return
        self._ended = True
        ending = {"status": status, "outcome": outcome or OUTCOMES[status], "final": final, "time": utc_now()}
        try:
            replace_file(self._directory / EXIT_FILE, json.dumps(ending) + "\n")
        except OSError as error:  # a full disk: the exit status still tells
            print(f"WARNING: {write_error(self._directory / EXIT_FILE, error)}", file=sys.stderr, flush=True)

    def lost(self) -> None:
        """Write that the job ends because another rank is gone."""
        self.end(EXIT_ERROR, LOST)

    def _note(self, text: str) -> None:
        with suppress(OSError):  # a full disk: a restarted group then obeys --resume again, and archives what it moves
            self._file.truncate(0)
            self._file.write(text)
            self._file.flush()


def _job() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "alone")


def _final_status(run_directory: Path) -> int | None:
    """Return the status that an earlier group left with, if a restart would not change it."""
    try:
        ending = read_json(run_directory / EXIT_FILE)
    except BadInput:
        return None
    status, final = ending.get("status"), ending.get("final")
    return status if final and status in (EXIT_STOPPED, EXIT_DIVERGED) else None


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
            name = printable(str(run_directory / LOCK_FILE))
            print(f"NOTE: {name}: cannot be locked ({error}); see that no other job trains this run", flush=True)
            return
