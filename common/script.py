"""Running a script: its packages, CUDA's allocator before torch is imported, its end and its exit status."""

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

# What training imports.
PACKAGES = ("attrs", "cattrs", "cyclopts", "jaxtyping", "matplotlib", "numpy", "safetensors", "torch", "tqdm")
# Names of one setting: since torch 2.9, and before.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # of a write, for which the user has to make room


class Script:
    """One run of a script, as a context. Every script ends here, whatever ends it; `status` is then its exit status.

    In the block the command line is read and carried out. It may raise BadInput, UsageError, and after --help
    SystemExit; the block sets `status`, and in `interrupted` the state that Ctrl-C leaves. `report` prints an error
    that ends the script and returns the exit status, or None for an error of the program, which is raised; by default
    it is `report_error`. `has_ranks`: all ranks of a job run the script, and rank 0 prints the errors that all of them
    raise.
    """

    def __init__(self, name: str, report: Callable[[Exception], int | None] | None = None, *, has_ranks: bool = False):
        self.status = EXIT_DONE
        self.interrupted: str | Callable[[], str] = ""  # follows the word "interrupted"
        self._name = name
        self._report = report or partial(report_error, name, has_ranks=has_ranks)
        self._interrupts: list[int] = []  # a library may make an error of its own of Ctrl-C
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
        """Report the error that has ended the block, if any; return whether it has been dealt with."""
        if self._catches_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = self.status if error is None else self._status_after(error)
        if status is None:
            return False
        self.status = checked_status(status)
        return True

    def _status_after(self, error: BaseException) -> int | None:
        if isinstance(error, SystemExit):
            return EXIT_DONE if error.code == EXIT_DONE else None  # after --help
        if isinstance(error, KeyboardInterrupt) or (self._interrupts and isinstance(error, Exception)):
            remains = self.interrupted if isinstance(self.interrupted, str) else self.interrupted()
            show_problems(self._name, f"interrupted{remains}")
            return EXIT_INTERRUPTED
        return self._report(error) if isinstance(error, Exception) else None

    def _interrupt(self, number: int, _: object) -> None:
        """Note a SIGINT and raise KeyboardInterrupt.

        Torch makes another error of it: while weights are read, any exception in a storage's `__len__` becomes a
        ValueError about its shape.
        """
        self._interrupts.append(number)
        raise KeyboardInterrupt


def report_error(script: str, error: Exception, *, has_ranks: bool = False) -> int | None:
    """Print a user's error, a line for each problem; return the exit status, or None for any other error."""
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
    """Print the problems, a line each, for which a script ends. `once`: rank 0 prints them for all."""
    show(*(Notice(f"{script}: {line}", Severity.ERROR) for line in problems.split("\n")), once=once)


def check_packages() -> None:
    """Raise BadInput if a package is missing that every script needs."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        made = (Path(__file__).parents[1] / ".venv" / "bin" / "activate").is_file()
        advice = "source .venv/bin/activate" if made else "make install && source .venv/bin/activate"
        problem = f"this Python, {sys.executable}, has no module {missing[0]}; run: {advice}"
        raise BadInput(problem, reason="usage-error")


def use_expandable_segments() -> None:
    """Enable expandable segments of torch's CUDA allocator (3 to 20 % less memory), unless the user has set it."""
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def checked_status(status: int) -> int:
    """Return a status, or an error where output that is this command's product was lost; stderr says so."""
    sys.stdout.flush()
    output = sys.stdout.output if isinstance(sys.stdout, GuardedStream) else None
    if output is None or output.problem is None or output.patience_seconds is not None:
        return status
    if not isinstance(output.problem, BrokenPipeError):
        lost = f"stdout: {output.problem.strerror}: what this command has printed is incomplete"
        show(Notice(f"{Path(sys.argv[0]).name}: {lost}", Severity.ERROR))
    return status or EXIT_ERROR


def leave(status: int) -> NoReturn:
    """End this process at once, without the interpreter's own shutdown.

    gloo's threads release their last tensors a moment after a collective returns. During the shutdown they would wait
    for an interpreter that is gone, and the process aborts: with torch 2.13, one in five short FSDP runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
