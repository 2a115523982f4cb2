"""Training jobs of an experiment: options, devices, and a job as a subprocess that does not outlive experiment.py."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from common.arguments import UsageError, option
from common.checks import integer
from common.errors import EXIT_ERROR, BadInput
from common.files import writing
from common.json_files import open_descriptor, open_regular
from training.command import WORLD_SIZE, Device
from training.supervision.run_lock import EXIT_FILE, read_exit
from training.telemetry.budget import MOST_HOURS, USD, Budget

ROOT = Path(__file__).parents[2]
JOB_LOG = "train.log"  # output of all jobs, in the run directory
LOG_TAIL_BYTES = 1 << 16
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class PoolOptions:
    """Options of an experiment's training jobs. The budget counts earlier calls of the same experiment."""

    at_once: Annotated[
        int | None,
        option(
            "runs side by side; default: as many as the GPUs, or on a CPU the cores, hold",
            "K",
            check=integer(1, 1 << 16),
        ),
    ] = None
    ranks: Annotated[int, option("ranks of each run, under torchrun", "R", check=WORLD_SIZE)] = 1
    device: Device = None
    price_per_hour: Annotated[float | None, option("price of the machine", "USD", check=USD)] = None
    budget: Budget = attrs.field(factory=Budget)

    def __attrs_post_init__(self) -> None:
        if self.budget.max_usd is not None and self.price_per_hour is None:
            raise UsageError("--max-usd needs --price-per-hour, the price of the machine")


@attrs.frozen
class PoolDevices:
    """Devices, and how many jobs share them, each with as many as it has ranks."""

    gpus: list[str]  # numbers, as CUDA_VISIBLE_DEVICES has them; none on a CPU
    at_once: int
    ranks: int

    @classmethod
    def of(cls, options: PoolOptions) -> "PoolDevices":
        """Return the devices of this machine. Raises BadInput where it has too few."""
        gpus, ranks = _gpus(options.device), options.ranks
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        at_once = options.at_once or max(1, (len(gpus) or cores) // ranks)
        if gpus and at_once * ranks > len(gpus):
            raise BadInput(f"--at-once {at_once} x --ranks {ranks}: this machine has {len(gpus)} GPUs")
        return cls(gpus, at_once, ranks)

    def free(self, taken: list[list[str]]) -> list[str] | None:
        """Return the devices of one more job beside those that jobs have taken; None where there are too few."""
        places = self.gpus or [str(place) for place in range(self.at_once * self.ranks)]
        left = [place for place in places if not any(place in devices for devices in taken)]
        return left[: self.ranks] if len(taken) < self.at_once and len(left) >= self.ranks else None

    def environment(self, devices: list[str]) -> dict[str, str]:
        """Return the environment variables of a job that has these devices."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if self.gpus else {"OMP_NUM_THREADS": "1"}


def train_command(
    directory: Path, options: PoolOptions, *, until_step: int | None = None, hours: float | None = None
) -> list[str]:
    """Return the arguments of Python that train a run, under torchrun on several ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    command = [*(torchrun if options.ranks > 1 else []), str(ROOT / "train.py"), str(directory)]
    if options.device is not None:
        command += ["--device", options.device]
    if until_step is not None:
        command += ["--max-steps", str(until_step)]
    if hours is not None:
        command += ["--max-hours", repr(min(hours, MOST_HOURS / 2))]
    return command


class TrainingProcess:
    """A job that this process has started."""

    def __init__(self, directory: Path, command: list[str], environment: dict[str, str]):
        """Start it. It has a session of its own: Ctrl-C in a terminal reaches experiment.py alone, which asks it."""
        path = self.log = directory / JOB_LOG
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with writing(path), os.fdopen(open_descriptor(path, flags), "ab") as log:
            self._log_start = log.tell()
            self._began = time.time()
            self._process = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_stop_with_parent(),  # noqa: PLW1509  # it takes no lock that a thread may hold
            )
        self._directory = directory

    def status(self) -> int | None:
        """Return the job's exit status, EXIT_ERROR where it was killed; None while it runs."""
        code = self._process.poll()
        if code in (None, 0):
            return code
        # torchrun ends with 1 whatever its ranks end with; exit.json tells, where this job has written it
        with suppress(OSError):
            ended = read_exit(self._directory)
            if ended is not None and (self._directory / EXIT_FILE).stat().st_mtime >= self._began:
                return ended.status
        return code if code is not None and code > 0 else EXIT_ERROR

    def ask_to_stop(self) -> None:
        """Ask it to save a checkpoint and to end."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and its ranks, and wait for it; the last checkpoint is as it was."""
        for pid in _children(self._process.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def last_words(self) -> str:
        """Return the last error of this job, as a line; the signal that killed it, if one did."""
        if (code := self._process.poll()) is not None and code < 0:
            memory = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"killed by {signal.Signals(-code).name}{memory}"
        text = b""
        with suppress(OSError), open_regular(self.log) as log:  # which may be gone
            log.seek(max(self._log_start, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            text = log.read()
        lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
        own = [line for line in lines if line.startswith("train.py: ")]
        return (own or lines or ["it printed nothing"])[-1]


def _gpus(device: str | None) -> list[str]:
    from training.hardware.usable_gpus import choose_device

    if choose_device(device) == "cpu":
        return []
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


def _stop_with_parent() -> Callable[[], None] | None:
    """Return a function to call in a new process: it gets SIGTERM, and saves a checkpoint, once this one was killed."""
    if sys.platform != "linux":
        return None
    parent, system = os.getpid(), ctypes.CDLL(None)

    def prepare() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # experiment.py's handler would lose it before the program begins
        system.prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(EXIT_ERROR)

    return prepare


def _children(pid: int) -> list[int]:
    with suppress(OSError):  # ended, or no /proc
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
