"""File lock: one process at a time, by flock. The system releases it however the process ends.

flock itself, because filelock (which torch installs) accepts a pipe at the path, refuses a symbolic link, and does not
tell a file system without locks from a file that cannot be opened.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import IO, Any, TextIO

from common.errors import BadInput, printable
from common.files import writing
from common.json_files import open_descriptor, open_regular

LOCK_POLL_SECONDS = 0.2


def open_locked(path: Path, contention: str, *, wait_seconds: float = 0.0) -> TextIO:
    """Open or create a lock file, and lock it until it is closed, as `lock` does.

    Raises BadInput also unless it is a regular file: a pipe's other end is not waited for.
    """
    with writing(path):
        file = os.fdopen(open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+", errors="replace")
    lock(file, path, contention, wait_seconds=wait_seconds)
    return file


class Locked(BadInput):
    """User error: another process holds a lock; once it has ended, the same command would do."""


def is_held(path: Path, *, absent: bool | None = None) -> bool | None:
    """Tell whether a process holds the lock of a file; None where that cannot be known, `absent` without the file."""
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once: a job that starts would try again
        return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return absent
    except OSError:  # a file system without locks, for one
        return None


def lock(file: IO[Any] | int, path: Path, contention: str, *, wait_seconds: float = 0.0) -> None:
    """Lock an open file for as long as it stays open; on a file system without locks, print a note instead.

    Raises Locked with the message `contention` when another process still holds the lock after `wait_seconds`.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Locked(contention) from None
            time.sleep(LOCK_POLL_SECONDS)
        except OSError as error:  # a file system without locks
            name = printable(str(path))
            print(f"NOTE: {name}: cannot be locked ({error}); make sure that no other process uses it", flush=True)
            return
