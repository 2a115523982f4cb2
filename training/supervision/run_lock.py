"""Run lock and exit record: the one job that trains a run directory, and how the last one ended.

`.lock` in the run directory is held by rank 0 of the job. The file also holds who that job is, and whether --resume is
done, for the groups of ranks that torchrun may start later in the same job: after a failure, or because a node has come
or gone. A job is the same while one of its torchruns lives.

`exit.json` is absent while a job runs and after a kill. It names its job, so that whoever has started one knows its
record without comparing times: the disk may have another clock. launch/node.sh wants each rank's, in a folder of the
node's own: torchrun does not tell how its ranks have ended.
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
LOCK_CHARACTERS = 1 << 20  # more than is ever written there
LOCK_SECONDS = 30.0  # to wait for a job that is about to end
EXIT_FILE = "exit.json"
LOST = "lost"  # outcome of the reason "lost-rank", whose status is that of an error
ERROR = "error"
OUTCOMES = {EXIT_DONE: "done", EXIT_DIVERGED: "diverged", EXIT_STOPPED: "stopped", EXIT_ERROR: ERROR, EXIT_USAGE: ERROR}
NODE_VARIABLE = "LOCKSTEP_EXIT_RECORDS"  # the folder of launch/node.sh, where it has started this


class LockHolder(NamedTuple):
    """A group of ranks, as the lock file has it."""

    nodes: int
    torchruns: Collection[str]  # launch.torchrun_identity of each
    resumed: bool = False  # it has done what --resume asked


class RunLock:
    """The lock of one process, held until it ends. Without a file, the null form: of ranks other than 0."""

    def __init__(self, file: TextIO | None = None, before: LockHolder | None = None):
        self.file = file
        self.resumed = False  # this job has done what --resume asked; known once the ranks have met
        self._before = before  # what has held it last, in this job or another
        self._torchruns: list[str] = []

    @property
    def restarted(self) -> bool:
        """True if this rank's torchrun has restarted a group that held it, on as many nodes."""
        if self._before is None or restarts() == 0:
            return False
        return torchrun_identity() in self._before.torchruns and self._before.nodes == environment_nodes()

    def write_job(self, torchruns: Collection[str]) -> None:
        """Write the holder, once the ranks have met. `torchruns`: those that have started them."""
        before, self._torchruns = self._before, sorted(torchruns)
        self.resumed = before is not None and before.resumed and not set(before.torchruns).isdisjoint(torchruns)
        self._write()

    def write_resumed(self) -> None:
        self.resumed = True
        self._write()

    def _write(self) -> None:
        if self.file is None:
            return
        holder = LockHolder(nodes=environment_nodes(), torchruns=self._torchruns, resumed=self.resumed)
        with suppress(OSError):  # a full disk: a restarted group then obeys --resume again, and archives what it moves
            self.file.truncate(0)
            self.file.write(json.dumps(holder._asdict()))
            self.file.flush()


def take_run_lock(run_directory: Path) -> RunLock:
    """Lock a run directory. Raises BadInput when another job holds the lock after LOCK_SECONDS."""
    contention = f"{run_directory}: another job trains this run; wait for it, or stop it"
    file = open_locked(run_directory / LOCK_FILE, contention, wait_seconds=LOCK_SECONDS)
    file.seek(0)
    return RunLock(file, _parsed(file.read(LOCK_CHARACTERS)))


def is_locked(run_directory: Path) -> bool:
    """Tell whether a job trains a run; where the file system has no locks, whether it has left no exit record."""
    held = lock_is_held(run_directory)
    return not (run_directory / EXIT_FILE).exists() if held is None else held


def lock_is_held(run_directory: Path) -> bool | None:
    """Tell whether a job holds the run lock; None where the file system has no locks."""
    return is_held(run_directory / LOCK_FILE, absent=False)


class ExitRecord:
    """The exit record of a job, written once. Without a run directory, of this rank, for launch/node.sh alone."""

    def __init__(self, run_directory: Path | None):
        """Remove the last job's record. Raises BadInput where that cannot be done."""
        folder, rank = os.environ.get(NODE_VARIABLE), os.environ.get("LOCAL_RANK", "0")
        self._paths = [Path(folder, f"{rank}.json")] if folder else []
        self._paths += [] if run_directory is None else [run_directory / EXIT_FILE]
        for path in self._paths:
            check_replaceable(path, _is_exit_record, "the exit record of a job")
            with writing(path):
                path.unlink(missing_ok=True)

    def write(self, status: int, reason: Reason, problem: str = "", *, final: bool = True) -> None:
        """Write how the job ends, and the lines of an error; the first call counts.

        Not `final`: a group of ranks that torchrun restarts continues the run.
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
            except OSError as error:  # a full disk: the exit status still tells
                show(warning(str(write_error(path, error))))


class JobExit(NamedTuple):
    """The content of an exit record."""

    status: int
    outcome: str
    final: bool
    job: str | None = None  # `job_identity` of its ranks; None in a record of an earlier version
    reason: Reason | None = None  # None in a record of an earlier version
    problem: str | None = None  # the lines of the error that ended it, if one did


def read_exit(run_directory: Path) -> JobExit | None:
    """Return how the last job ended; None where it has not, was killed, or the record is damaged."""
    with suppress(BadInput, KeyError):
        record = read_json(run_directory / EXIT_FILE)
        status, outcome, final = (record[key] for key in ("status", "outcome", "final"))
        job, reason, problem = (record.get(key) for key in ("job", "reason", "problem"))
        texts = isinstance(outcome, str) and isinstance(job, str | None) and isinstance(problem, str | None)
        if type(status) is int and isinstance(final, bool) and texts:
            return JobExit(status, outcome, final, job, reason if reason in REASONS else None, problem)
    return None


def final_exit(run_directory: Path) -> JobExit | None:
    """Return the last job's record if a restart would not change it: stopped or diverged; else None."""
    ended = read_exit(run_directory)
    return ended if ended and ended.final and ended.status in (EXIT_STOPPED, EXIT_DIVERGED) else None


def _is_exit_record(content: bytes) -> bool:
    """Tell whether a file is an exit record: all versions have written an integer status, and the outcome as a text."""
    try:
        record = parse_json(content)
    except ValueError:
        return False
    return isinstance(record, dict) and type(record.get("status")) is int and isinstance(record.get("outcome"), str)


def _parsed(text: str) -> LockHolder | None:
    """Return the holder; None for an empty file, and one that was torn or damaged."""
    with suppress(ValueError, TypeError):
        holder = LockHolder(**parse_json(text))
        if type(holder.nodes) is int and all(isinstance(one, str) for one in holder.torchruns):
            return holder
    return None
