"""Exit record: `exit.json` in the run directory, how the last job ended. Absent while one runs and after a kill."""

import json
import sys
from pathlib import Path

import attrs

from common.clock import utc_now
from common.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, BadInput
from common.files import replace_file, write_error, writing
from common.json_files import read_json

EXIT_FILE = "exit.json"
ERROR = "error"
LOST = "lost"  # another rank was killed, froze or hung; EXIT_ERROR as well
OUTCOMES = {EXIT_DONE: "done", EXIT_ERROR: ERROR, EXIT_DIVERGED: "diverged", EXIT_STOPPED: "stopped"}


class ExitRecord:
    """The exit record of a job, written once. Without a run directory, the null form: of ranks other than 0."""

    def __init__(self, run_directory: Path | None):
        """Remove the last job's record. Raises BadInput where that cannot be done."""
        self._path = None if run_directory is None else run_directory / EXIT_FILE
        if self._path is not None:
            with writing(self._path):
                self._path.unlink(missing_ok=True)

    def write(self, status: int, outcome: str | None = None, *, final: bool = True) -> None:
        """Write how the job ends; the first call counts. Not `final`: a group of ranks that torchrun restarts goes on.

        The outcome is the status's own, unless given: LOST has no status of its own.
        """
        path, self._path = self._path, None
        if path is None:
            return
        record = {"status": status, "outcome": outcome or OUTCOMES[status], "final": final, "time": utc_now()}
        try:
            replace_file(path, json.dumps(record) + "\n")
        except OSError as error:  # a full disk: the exit status still tells
            print(f"WARNING: {write_error(path, error)}", file=sys.stderr, flush=True)


@attrs.frozen(kw_only=True)
class JobExit:
    """The content of an exit record."""

    status: int
    outcome: str
    final: bool


def read_exit(run_directory: Path) -> JobExit | None:
    """Return how the last job ended; None where it has not, was killed, or the record is damaged."""
    try:
        record = read_json(run_directory / EXIT_FILE)
    except BadInput:
        return None
    status, outcome, final = (record.get(key) for key in ("status", "outcome", "final"))
    if type(status) is not int or not isinstance(outcome, str) or not isinstance(final, bool):
        return None
    return JobExit(status=status, outcome=outcome, final=final)


def final_status(run_directory: Path) -> int | None:
    """Return the status of the last job's record if a restart would not change it: stopped or diverged; else None."""
    found = read_exit(run_directory)
    return found.status if found and found.final and found.status in (EXIT_STOPPED, EXIT_DIVERGED) else None
