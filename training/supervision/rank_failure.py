"""The end of train.py by an error: the rank that prints it, and the records of its reason."""

import traceback

from common.errors import (
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_USAGE,
    BadInput,
    Diverged,
    Reason,
    UsageError,
    reason_of_system_error,
)
from common.files import Locked, system_error
from common.launch import (
    Failure,
    environment_nodes,
    is_first_on_machine,
    tell_torchrun,
)
from common.output import is_rank_0
from common.script import show_problems
from training.supervision.supervision import Supervision

RANK_0_SECONDS = 30.0  # for rank 0 to print an error, after a slow start: torchrun ends all ranks once one has failed
STATUSES: dict[type[Exception], int] = {Diverged: EXIT_DIVERGED, UsageError: EXIT_USAGE}


def report(error: Exception, supervision: Supervision) -> int:
    """Print an error that ends this rank, unless another rank prints the same; record it, and return the exit status.

    A user's error is printed as lines, any other error with its traceback. torchrun's table of failed ranks has the
    text as well, and exit.json the reason.
    """
    reason, problem = describe_error(error)
    status = STATUSES.get(type(error), EXIT_ERROR)
    if reason == "usage-error":
        supervision.exit_record.write(status, reason, str(error))
        if not is_first_on_machine():  # the other ranks of this machine would print the same
            return EXIT_DONE
        print_failure(Failure(status, reason, str(error)))
        return status
    follows = False  # this rank ends as rank 0 does, which has printed the error
    if problem is not None:
        failure = Failure(status, reason, problem)
        is_on_all = isinstance(error, Diverged) or (isinstance(error, BadInput) and not error.alone)
        # Rank 0 raises the same; when it has printed it and ended, torchrun sends this rank SIGTERM.
        follows = not is_rank_0() and is_on_all and supervision.stop_requested.wait(RANK_0_SECONDS)
        if not follows:
            print_failure(failure)
    else:
        lines = traceback.format_exception(error)
        failure_behind = supervision.failure_behind(error)
        tell_torchrun("".join(lines), status, reason if failure_behind is None else "failed-rank")
        traceback.print_exception(error)
        failure = failure_behind or Failure(status, reason, traceback.format_exception_only(error)[-1].strip())
    if not isinstance(error, Locked):  # launch/node.sh starts again when another job has the run
        supervision.exit_record.write(*failure)
    if failure.status == EXIT_DIVERGED:
        supervision.end_torchrun()
    return EXIT_DONE if follows and environment_nodes() == 1 else failure.status  # torchrun's table is of rank 0 alone


def print_failure(failure: Failure) -> None:
    """Print why this rank ends, each problem as one line; torchrun's table of failed ranks has it, too."""
    show_problems("train.py", failure.problem)
    tell_torchrun(failure.problem, failure.status, failure.reason)


def describe_error(error: Exception) -> tuple[Reason, str | None]:
    """Return why an error ends train.py, and its lines if the user can do something about it; None for any other.

    What the ranks around it do is not considered: `collective_failed`.
    """
    if isinstance(error, BadInput):
        return error.reason, str(error)
    if isinstance(error, UsageError):
        return "usage-error", str(error)
    if isinstance(error, Diverged):
        return "non-finite", str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return reason_of_system_error(error), system_error(error)  # a file or folder that cannot be read, for one
    from training.hardware.usable_gpus import is_memory_error

    return ("out-of-memory" if is_memory_error(error) else "crash"), None
