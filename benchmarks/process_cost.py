"""Cost of a command: wall-clock and CPU seconds, peak memory and peak disk while it runs."""

import resource
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from process_tree import process_tree

SAMPLE_SECONDS = 0.05

Process = subprocess.Popen[bytes]


def measure(
    command: list[str], folder: Path, environment: dict[str, str], watch: Callable[[Process], None]
) -> tuple[float, float]:
    """Run a command in a folder to its end, with `watch` in a thread beside it; return wall clock and CPU seconds.

    CPU seconds are those of the process and all that it starts and waits for. Exits with what a failed command said.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, cwd=folder)
    watcher = threading.Thread(target=watch, args=(process,), daemon=True)
    watcher.start()
    _, errors = process.communicate()
    wall = time.perf_counter() - began
    watcher.join()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)}:\n{errors.decode()[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Peaks:
    """The most anonymous memory of a process and all below it, and the most that lay in a folder, both in bytes."""

    def __init__(self, folder: Path):
        self.memory = self.disk = 0
        self._folder = folder

    def watch(self, process: Process) -> None:
        """Look again and again while a process runs; memory more often than disk."""
        turn = 0
        while process.poll() is None:
            self.memory = max(self.memory, sum(_anonymous_bytes(pid) for pid in process_tree(process.pid)))
            if turn % 20 == 0:
                self.look_at_disk()
            turn += 1
            time.sleep(SAMPLE_SECONDS)

    def look_at_disk(self) -> None:
        """Count what lies in the folder now."""
        total = 0
        for path in self._folder.rglob("*"):
            try:
                total += path.stat().st_size if path.is_file() else 0
            except OSError:
                continue
        self.disk = max(self.disk, total)


def _anonymous_bytes(pid: int) -> int:
    """Return a process's share of its anonymous memory."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:")), 0)
