"""What happens when an error ends train.py: which rank prints the error, and how its reason is recorded."""

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

# How long the other ranks wait for rank 0 to print an error. Rank 0 may be late after a slow start. torchrun ends all
# ranks once one of them has failed.
RANK_0_SECONDS = 30.0
STATUSES: dict[type[Exception], int] = {Diverged: EXIT_DIVERGED, UsageError: EXIT_USAGE}


def report(error: Exception, supervision: Supervision) -> int:
    """Record an error that ends this rank. Print it as well, unless another rank prints the same error.

    Returns the exit status. A user's error is printed as lines, any other error with its traceback. The text also
    appears in torchrun's table of failed ranks, and the reason is written to exit.json.
    """
    reason, problem = describe_error(error)
    status = STATUSES.get(type(error), EXIT_ERROR)
    if reason == "usage-error":
        supervision.exit_record.write(status, reason, str(error))
        if not is_first_on_machine():  # the other ranks of this machine would print the same error
            return EXIT_DONE
        print_failure(Failure(status, reason, str(error)))
        return status
    rank_0_printed = False
    if problem is not None:
        failure = Failure(status, reason, problem)
        is_on_all = isinstance(error, Diverged) or (isinstance(error, BadInput) and not error.alone)
        # Rank 0 raises the same error. After it has printed the error and ended, torchrun sends this rank SIGTERM.
        rank_0_printed = not is_rank_0() and is_on_all and supervision.stop_requested.wait(RANK_0_SECONDS)
        if not rank_0_printed:
            print_failure(failure)
    else:
        lines = traceback.format_exception(error)
        failure_behind = supervision.failure_behind(error)
        tell_torchrun("".join(lines), status, reason if failure_behind is None else "failed-rank")
        traceback.print_exception(error)
        failure = failure_behind or Failure(status, reason, traceback.format_exception_only(error)[-1].strip())
    # While another job is training the run, nothing is recorded, so that launch/node.sh tries again.
    if not isinstance(error, Locked):
        supervision.exit_record.write(*failure)
    if failure.status == EXIT_DIVERGED:
        supervision.end_torchrun()
    # On one node, this rank ends with status 0, so that torchrun's table of failures lists rank 0 only.
    return EXIT_DONE if rank_0_printed and environment_nodes() == 1 else failure.status


def print_failure(failure: Failure) -> None:
    """Print why this rank ends, one line per problem, and pass the text to torchrun's table of failed ranks."""
    show_problems("train.py", failure.problem)
    tell_torchrun(failure.problem, failure.status, failure.reason)


def describe_error(error: Exception) -> tuple[Reason, str | None]:
    """Return the reason and the text of an error that ends train.py. The text is None if the user cannot fix the error.

    Errors that are caused by other ranks are not recognized here; see `Supervision.failure_behind`.
    """
    if isinstance(error, BadInput):
        return error.reason, str(error)
    if isinstance(error, UsageError):
        return "usage-error", str(error)
    if isinstance(error, Diverged):
        return "non-finite", str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return reason_of_system_error(error), system_error(error)  # for example, a file that cannot be read
    from training.hardware.usable_gpus import is_memory_error

    return ("out-of-memory" if is_memory_error(error) else "crash"), None
