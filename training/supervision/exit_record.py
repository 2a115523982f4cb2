"""Exit record: `exit.json` in the run directory, how the last job ended. Absent while one runs and after a kill.

launch/node.sh wants each rank's, in a folder of the node's own: torchrun does not tell how its ranks have ended.
"""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from common.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, EXIT_USAGE, BadInput
from common.files import replace_file, write_error, writing
from common.json_files import read_json, utc_now

EXIT_FILE = "exit.json"
ERROR = "error"
LOST = "lost"  # another rank was killed, froze or hung; EXIT_ERROR as well
OUTCOMES = {EXIT_DONE: "done", EXIT_DIVERGED: "diverged", EXIT_STOPPED: "stopped", EXIT_ERROR: ERROR, EXIT_USAGE: ERROR}
NODE_VARIABLE = "LOCKSTEP_EXIT_RECORDS"  # the folder of launch/node.sh, where it has started this


class ExitRecord:
    """The exit record of a job, written once. Without a run directory, of this rank, for launch/node.sh alone."""

    def __init__(self, run_directory: Path | None):
        """Remove the last job's record. Raises BadInput where that cannot be done."""
        folder, rank = os.environ.get(NODE_VARIABLE), os.environ.get("LOCAL_RANK", "0")
        self._paths = [Path(folder, f"{rank}.json")] if folder else []
        self._paths += [] if run_directory is None else [run_directory / EXIT_FILE]
        for path in self._paths:
            with writing(path):
                path.unlink(missing_ok=True)

    def write(self, status: int, outcome: str | None = None, *, final: bool = True) -> None:
        """Write how the job ends; the first call counts. Not `final`: a group of ranks that torchrun restarts goes on.

        The outcome is the status's own, unless given: LOST has no status of its own.
        """
        paths, self._paths = self._paths, []
        record = {"status": status, "outcome": outcome or OUTCOMES[status], "final": final, "time": utc_now()}
        for path in paths:
            try:
                replace_file(path, json.dumps(record) + "\n")
            except OSError as error:  # a full disk: the exit status still tells
                print(f"WARNING: {write_error(path, error)}", file=sys.stderr, flush=True)


class JobExit(NamedTuple):
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
