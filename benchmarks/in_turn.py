"""Trainers that take a step each in turn, the others halted meanwhile: what else the machine does, it does to all."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.errors import BadInput  # after the path to it

STEP = re.compile(r"^(iter|timed) \d+")  # the line that ends a step: nanoGPT's, and benchmarks/measured_run.py's


class Stepper:
    """A trainer in a process of its own, on a CPU. It runs freely until its first step. Close it."""

    def __init__(self, command: list[str], folder: Path, threads: int):
        environment = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        self._command = " ".join(command)
        self._errors = (folder / "errors.txt").open("w+")
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def step(self) -> tuple[float, float]:
        """Let it take a step; return wall-clock and CPU seconds. Raises BadInput with its last words where it ends."""
        assert self._process.stdout is not None
        os.kill(self._process.pid, signal.SIGCONT)
        wall, cpu = time.perf_counter(), self._cpu_seconds()
        for line in self._process.stdout:
            if STEP.match(line):
                os.kill(self._process.pid, signal.SIGSTOP)
                return time.perf_counter() - wall, self._cpu_seconds() - cpu
        self._errors.seek(0)
        raise BadInput(f"{self._command}: ended too early:\n{self._errors.read()[-4000:]}")

    def close(self) -> None:
        """End it, wherever it is."""
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _cpu_seconds(self) -> float:
        """Return what all threads of the process have used so far, on Linux."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
