"""Training process: one job of a run as a subprocess, or one that a killed experiment.py has left behind."""

import calendar
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import attrs

from common.errors import EXIT_ERROR
from common.files import writing
from common.json_files import open_descriptor, open_regular
from experiments.shared.pool_options import PoolOptions
from experiments.shared.run_progress import lock_holder
from training.supervision.exit_record import EXIT_FILE, read_exit
from training.supervision.run_lock import lock_is_held
from training.telemetry.budget import MOST_HOURS
from training.telemetry.metrics_log import read_lines

JOB_VARIABLE = "LOCKSTEP_EXPERIMENT_JOB"
START_UP_SECONDS = 3600.0  # longest from a job's start to its first record: later ones are of another job


@attrs.frozen(kw_only=True)
class PoolJob:
    """A job as the account holds it."""

    devices: list[str]  # numbers of GPUs, or of places on a CPU
    began: float  # Unix time
    seconds: float | None = None  # it ends before so many, by its --max-hours
    token: str = attrs.field(factory=lambda: secrets.token_hex(8))

    def process(self, directory: Path) -> int | None:
        """Return the process of this job that holds the run lock; None for another job's, or an unknown one."""
        holder = lock_holder(directory)
        if holder is not None:
            with suppress(OSError):  # it has ended
                if f"{JOB_VARIABLE}={self.token}".encode() in Path(f"/proc/{holder}/environ").read_bytes().split(b"\0"):
                    return holder
        return None

    def lives(self, directory: Path) -> bool:
        """Tell whether it still trains, or something does of which the system does not tell (/proc) what."""
        if not lock_is_held(directory):
            return False
        return lock_holder(directory) is None or self.process(directory) is not None

    def last_written(self, directory: Path) -> float:
        """Return when it last wrote to the metrics, by the times in them, Unix time; when it began, where it did not.

        Lines between two events have no time, but the elapsed time of the run: at most so much after the start.
        """
        last, started, before, elapsed = self.began, None, 0.0, 0.0
        for line in read_lines(directory):
            at = _unix_time(line.get("time"))
            if line.get("event") == "start":
                if started is not None:
                    break  # another job's
                if at is not None and -1 <= at - self.began <= START_UP_SECONDS:
                    started, before = at, elapsed
            elapsed = max(elapsed, line.get("elapsed_seconds", 0.0))
            if started is not None:
                last = max(last, at or 0.0, started + elapsed - before)
        return last if self.seconds is None else min(last, self.began + self.seconds)


def _unix_time(text: object) -> float | None:
    """Return the seconds of a timestamp as `common.clock.utc_now` writes it."""
    with suppress(ValueError, TypeError):
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))  # type: ignore[arg-type]
    return None


ROOT = Path(__file__).parents[2]
JOB_LOG = "train.log"  # output of all jobs, in the run directory
LOG_TAIL_BYTES = 1 << 16


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
        if self._process.poll() is None:
            _send(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and its ranks, and wait for it; the last checkpoint is as it was."""
        for pid in [*_children(self._process.pid), self._process.pid]:
            _send(pid, signal.SIGKILL)
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


@attrs.frozen
class AdoptedProcess:
    """A job of an earlier call of experiment.py, which was killed; or one that the user has started by hand.

    It goes on to its own end: a job of an earlier call to its step or limit of time.
    """

    directory: Path
    job: PoolJob | None  # that the account holds for this run, not seen to end

    @property
    def own(self) -> PoolJob | None:
        """The job of an earlier call, as far as the system tells that it is what trains; None for the user's."""
        return self.job if self.job is not None and self.job.process(self.directory) is not None else None

    def status(self) -> int | None:
        """Return 0 once it has ended, however; None while it holds the run lock."""
        return None if lock_is_held(self.directory) else 0

    def ask_to_stop(self) -> None:
        """Ask an earlier call's job to save a checkpoint and to end; leave the user's."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def last_words(self) -> str:
        raise AssertionError("it has no failure of its own: the next job repeats it")

    def _signal(self, number: int) -> None:
        process = None if self.job is None else self.job.process(self.directory)
        if process is not None:
            _send(process, number)


def _children(pid: int) -> list[int]:
    with suppress(OSError):  # ended, or no /proc
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
