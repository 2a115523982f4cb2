"""Run lock and exit record: which job trains a run directory, and how the last job ended.

Rank 0 of a job holds `.lock` in the run directory. The file also records which job that is, and whether the option
--resume has been applied. Later groups of ranks need this: torchrun may start another group in the same job after a
failure, or because a node has joined or left. A job continues as long as one of its torchruns is alive.

`exit.json` does not exist while a job runs, nor after a kill. It names its job, so that the program that started a job
recognizes the job's record. Comparing times would not be enough, because the disk's clock may differ. launch/node.sh
reads a record of each rank from a folder on the node, because torchrun does not report how its ranks ended.
"""

import json
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from common.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, EXIT_USAGE, REASONS, BadInput, Reason
from common.files import check_replaceable, is_held, open_locked, replace_file, write_error, writing
from common.json_files import parse_json, read_json, utc_now
from common.launch import environment_nodes, job_identity, restarts, torchrun_identity
from common.output import show, warning
from common.redaction import redacted
from common.text import printable

LOCK_FILE = ".lock"
LOCK_CHARACTERS = 1 << 20  # limit for reading the file; its content is always shorter
LOCK_SECONDS = 30.0  # how long to wait for a job that may be about to end
EXIT_FILE = "exit.json"
LOST = "lost"  # outcome for the reason "lost-rank"; the status is EXIT_ERROR
ERROR = "error"
OUTCOMES = {EXIT_DONE: "done", EXIT_DIVERGED: "diverged", EXIT_STOPPED: "stopped", EXIT_ERROR: ERROR, EXIT_USAGE: ERROR}
NODE_VARIABLE = "LOCKSTEP_EXIT_RECORDS"  # folder for the exit record of each rank, set by launch/node.sh


class LockHolder(NamedTuple):
    """A group of ranks that holds the lock, as the lock file describes it."""

    nodes: int
    torchruns: Collection[str]  # the launch.torchrun_identity of each torchrun
    resumed: bool = False  # whether the group has applied --resume


class RunLock:
    """The lock of one process, held until the process ends. Ranks other than 0 have a lock without a file."""

    def __init__(self, file: TextIO | None = None, last_holder: LockHolder | None = None):
        self.file = file
        self.resumed = False  # whether this job has applied --resume; set once the ranks have met
        self._last_holder = last_holder  # the last group of ranks that held the lock, in this or another job
        self._torchruns: list[str] = []

    @property
    def restarted(self) -> bool:
        """True if the last holder was started by this rank's torchrun, with the same number of nodes."""
        if self._last_holder is None or restarts() == 0:
            return False
        return torchrun_identity() in self._last_holder.torchruns and self._last_holder.nodes == environment_nodes()

    def write_job(self, torchruns: Collection[str]) -> None:
        """Write the holder into the file. Called once the ranks have met.

        Arguments:
            torchruns: the identities of the torchrun processes that started the ranks
        """
        last, self._torchruns = self._last_holder, sorted(torchruns)
        self.resumed = last is not None and last.resumed and not set(last.torchruns).isdisjoint(torchruns)
        self._write()

    def write_resumed(self) -> None:
        self.resumed = True
        self._write()

    def _write(self) -> None:
        if self.file is None:
            return
        holder = LockHolder(nodes=environment_nodes(), torchruns=self._torchruns, resumed=self.resumed)
        # If this fails because the disk is full, a restarted group applies --resume again. That loses nothing, because
        # the option only moves checkpoints to the archive.
        with suppress(OSError):
            self.file.truncate(0)
            self.file.write(json.dumps(holder._asdict()))
            self.file.flush()


def take_run_lock(run_directory: Path) -> RunLock:
    """Lock a run directory. Raises BadInput if another job still holds the lock after LOCK_SECONDS."""
    contention = f"{run_directory}: another job is training this run; wait for it to end, or stop it"
    file = open_locked(run_directory / LOCK_FILE, contention, wait_seconds=LOCK_SECONDS)
    file.seek(0)
    return RunLock(file, _parsed(file.read(LOCK_CHARACTERS)))


def is_locked(run_directory: Path) -> bool:
    """Return whether a job is training a run.

    If the file system has no locks, a run without an exit record counts as being trained.
    """
    locked = lock_is_held(run_directory)
    return not (run_directory / EXIT_FILE).exists() if locked is None else locked


def lock_is_held(run_directory: Path) -> bool | None:
    """Return whether a job holds the run lock; None if the file system has no locks."""
    return is_held(run_directory / LOCK_FILE, absent=False)


class ExitRecord:
    """The exit record of a job, written once.

    Without a run directory, it is only a record of this rank for launch/node.sh.
    """

    def __init__(self, run_directory: Path | None):
        """Remove the last job's record. Raises BadInput if that is impossible."""
        folder, rank = os.environ.get(NODE_VARIABLE), os.environ.get("LOCAL_RANK", "0")
        self._paths = [Path(folder, f"{rank}.json")] if folder else []
        self._paths += [] if run_directory is None else [run_directory / EXIT_FILE]
        for path in self._paths:
            check_replaceable(path, _is_exit_record, "the exit record of a job")
            with writing(path):
                path.unlink(missing_ok=True)

    def write(self, status: int, reason: Reason, problem: str = "", *, final: bool = True) -> None:
        """Write how the job ends, and the lines of an error. Only the first call has an effect.

        `final` is false if the run continues when torchrun restarts the ranks.
        """
        paths, self._paths = self._paths, []
        record = {
            "status": status,
            "outcome": LOST if reason == "lost-rank" else OUTCOMES[status],
            "reason": reason,
            "problem": "\n".join(printable(redacted(line)) for line in problem.splitlines()) or None,
            "final": final,
            "time": utc_now(),
            "job": job_identity(),
        }
        for path in paths:
            try:
                replace_file(path, json.dumps(record) + "\n")
            except OSError as error:  # for example on a full disk; the exit status is still correct
                show(warning(str(write_error(path, error))))


class JobExit(NamedTuple):
    """The content of an exit record."""

    status: int
    outcome: str
    final: bool
    job: str | None = None  # `job_identity` of the job's ranks; None in a record of an earlier version
    reason: Reason | None = None  # None in a record of an earlier version
    problem: str | None = None  # the lines of the error that ended the job, if there was one


def read_exit(run_directory: Path) -> JobExit | None:
    """Return how the last job ended; None if it is running or was killed, or if the record is damaged."""
    with suppress(BadInput, KeyError):
        record = read_json(run_directory / EXIT_FILE)
        status, outcome, final = (record[key] for key in ("status", "outcome", "final"))
        job, reason, problem = (record.get(key) for key in ("job", "reason", "problem"))
        texts = isinstance(outcome, str) and isinstance(job, str | None) and isinstance(problem, str | None)
        if type(status) is int and isinstance(final, bool) and texts:
            return JobExit(status, outcome, final, job, reason if reason in REASONS else None, problem)
    return None


def final_exit(run_directory: Path) -> JobExit | None:
    """Return how the last job ended if it stopped or diverged, and a restart must not continue it; otherwise None."""
    job_exit = read_exit(run_directory)
    return job_exit if job_exit and job_exit.final and job_exit.status in (EXIT_STOPPED, EXIT_DIVERGED) else None


def _is_exit_record(content: bytes) -> bool:
    """Return whether a file is an exit record. All versions have written an integer status and a string outcome."""
    try:
        record = parse_json(content)
    except ValueError:
        return False
    return isinstance(record, dict) and type(record.get("status")) is int and isinstance(record.get("outcome"), str)


def _parsed(text: str) -> LockHolder | None:
    """Return the holder that a lock file names; None if the file is empty, incomplete or damaged."""
    with suppress(ValueError, TypeError):
        holder = LockHolder(**parse_json(text))
        if type(holder.nodes) is int and all(isinstance(identity, str) for identity in holder.torchruns):
            return holder
    return None
