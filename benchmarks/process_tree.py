"""A process and all below it, on Linux: listed, ended with SIGTERM, killed with SIGKILL."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.01
GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL
GONE_SECONDS = 60.0  # for a killed process to be gone: the driver frees its memory first


def process_tree(pid: int) -> Iterator[int]:
    """Yield a process and all below it."""
    yield pid
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from process_tree(int(child))
    except OSError:  # it has just ended
        return


def kill_tree(process: subprocess.Popen[str]) -> None:
    """Kill a process and all below it by SIGKILL, and wait until they are gone."""
    pids = list(process_tree(process.pid))
    _send(pids, signal.SIGKILL)
    process.wait()
    _wait(pids, GONE_SECONDS)


def end_tree(process: subprocess.Popen[str]) -> None:
    """End a process and all below it by SIGTERM, and those that stay by SIGKILL."""
    pids = list(process_tree(process.pid))
    _send(pids, signal.SIGTERM)
    _wait(pids, GRACE_SECONDS)
    _send(pids, signal.SIGKILL)
    process.wait()
    _wait(pids, GONE_SECONDS)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait(pids: Sequence[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def is_running(pid: int) -> bool:
    """Tell whether a process is there, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
