"""Run a script: check its packages, set up CUDA's allocator before torch is imported, report errors and exit."""

import errno
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, BadInput, UsageError
from common.output import GuardedStream, Notice, Severity, guard_outputs, show

# The packages that training imports.
PACKAGES = ("attrs", "cattrs", "cyclopts", "jaxtyping", "matplotlib", "numpy", "safetensors", "torch", "tqdm")
# Three names of the same setting. Torch 2.9 and newer use the first name, older versions the other two.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # write errors that only the user can fix


class Script:
    """One run of a script, as a context manager. Whatever ends the script is handled here.

    The block parses the command line and runs the command. It may raise BadInput, UsageError and, after --help,
    SystemExit. It sets two attributes: `status`, the exit status, which is final when the context has ended, and
    `interrupted`, which describes what is left behind after Ctrl-C.

    Arguments:
        name: the name of the script in messages
        report: a function that prints the error that ends the script, and returns the exit status. For a bug, the
            function returns None, and the error is raised. The default is `report_error`.
        has_ranks: whether all ranks of a job run the script. If so, rank 0 prints the errors that all of them raise.
    """

    def __init__(self, name: str, report: Callable[[Exception], int | None] | None = None, *, has_ranks: bool = False):
        self.status = EXIT_DONE
        self.interrupted: str | Callable[[], str] = ""  # the message's text after the word "interrupted"
        self._name = name
        self._report = report or partial(report_error, name, has_ranks=has_ranks)
        self._interrupts: list[int] = []  # signals; recorded because a library may convert Ctrl-C to its own error
        self._catches_interrupts = False

    def __enter__(self) -> "Script":
        """Guard the outputs and prepare torch. Exits if a package is missing."""
        guard_outputs()
        try:
            check_packages()
        except BadInput as error:
            sys.exit(self._report(error))
        use_expandable_segments()
        self._catches_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._catches_interrupts:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Report the error that has ended the block, if any, and return whether it is handled."""
        if self._catches_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = self.status if error is None else self._status_after(error)
        if status is None:
            return False
        self.status = checked_status(status)
        return True

    def _status_after(self, error: BaseException) -> int | None:
        if isinstance(error, SystemExit):
            return EXIT_DONE if error.code == EXIT_DONE else None  # --help exits with EXIT_DONE
        if isinstance(error, KeyboardInterrupt) or (self._interrupts and isinstance(error, Exception)):
            state = self.interrupted if isinstance(self.interrupted, str) else self.interrupted()
            show_problems(self._name, f"interrupted{state}")
            return EXIT_INTERRUPTED
        return self._report(error) if isinstance(error, Exception) else None

    def _interrupt(self, number: int, _: object) -> None:
        """Record a SIGINT and raise KeyboardInterrupt.

        Torch may convert KeyboardInterrupt to another error: while weights are read, any exception in a storage's
        `__len__` becomes a ValueError about the storage's shape.
        """
        self._interrupts.append(number)
        raise KeyboardInterrupt


def report_error(script: str, error: Exception, *, has_ranks: bool = False) -> int | None:
    """Print a user error, one line per problem, and return the exit status. Return None for any other error."""
    if isinstance(error, UsageError):
        show_problems(script, str(error))
        return EXIT_USAGE
    if isinstance(error, OSError) and error.filename is not None and error.errno in DISK_FULL:
        from common.files import write_error

        error = write_error(os.fsdecode(error.filename), error)
    if not isinstance(error, BadInput):
        return None
    show_problems(script, str(error), once=has_ranks and not error.alone)
    return EXIT_ERROR


def show_problems(script: str, problems: str, *, once: bool = False) -> None:
    """Print the problems that end a script, one line each. With `once`, rank 0 prints them for all ranks."""
    show(*(Notice(f"{script}: {line}", Severity.ERROR) for line in problems.split("\n")), once=once)


def check_packages() -> None:
    """Raise BadInput if a package that every script needs is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        is_installed = (Path(__file__).parents[1] / ".venv" / "bin" / "activate").is_file()
        advice = "source .venv/bin/activate" if is_installed else "make install && source .venv/bin/activate"
        problem = f"this Python, {sys.executable}, has no module {missing[0]}; run: {advice}"
        raise BadInput(problem, reason="usage-error")


def use_expandable_segments() -> None:
    """Enable expandable segments in torch's CUDA allocator, unless the user has configured it.

    With them, runs need 3 to 20% less memory.
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def checked_status(status: int) -> int:
    """Return the exit status to use for a command that has returned `status`.

    If the command's output is its only product, and output was lost, the status is never 0. The lost output is also
    mentioned on stderr, unless the reader has closed the pipe.
    """
    sys.stdout.flush()
    output = sys.stdout.output if isinstance(sys.stdout, GuardedStream) else None
    if output is None or output.problem is None or output.patience_seconds is not None:
        return status
    if not isinstance(output.problem, BrokenPipeError):
        problem = f"stdout: {output.problem.strerror}: the output of this command is incomplete"
        show(Notice(f"{Path(sys.argv[0]).name}: {problem}", Severity.ERROR))
    return status or EXIT_ERROR


def leave(status: int) -> NoReturn:
    """End this process immediately, without the interpreter's shutdown.

    gloo's threads release their last tensors shortly after a collective returns. During the shutdown they would wait
    for an interpreter that no longer exists, and the process would abort. With torch 2.13, this happened in one of five
    short FSDP runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
