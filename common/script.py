"""Running a script: its packages, CUDA's allocator before torch is imported, its end and its exit status."""

import errno
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, BadInput, UsageError
from common.output import GuardedStream, guard_outputs

# What training imports.
PACKAGES = ("attrs", "cattrs", "cyclopts", "jaxtyping", "matplotlib", "numpy", "safetensors", "torch", "tqdm")
# Names of one setting: since torch 2.9, and before.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # of a write, for which the user has to make room


def prepare_process(script: str) -> None:
    """Guard stdout and stderr; exit with one line of error when packages are missing; else configure the allocator."""
    guard_outputs()
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        made = (Path(__file__).parents[1] / ".venv" / "bin" / "activate").is_file()
        advice = "source .venv/bin/activate" if made else "make install && source .venv/bin/activate"
        sys.exit(f"{script}: this Python, {sys.executable}, has no module {missing[0]}; run: {advice}")
    use_expandable_segments()


def exit_status(script: str, main: Callable[[], int]) -> int:
    """Run a script's main function; return its exit status, as `checked_status`, after a line about a usage error."""
    guard_outputs()
    try:
        status = main()
    except UsageError as error:
        print(f"{script}: {error}", file=sys.stderr)
        status = EXIT_USAGE
    except SystemExit as end:
        if end.code != EXIT_DONE:
            raise
        status = EXIT_DONE  # of --help
    return checked_status(status)


def checked_status(status: int) -> int:
    """Return a status, or an error where output that is this command's product was lost; stderr says so."""
    sys.stdout.flush()
    output = sys.stdout.output if isinstance(sys.stdout, GuardedStream) else None
    if output is None or output.problem is None or output.patience_seconds is not None:
        return status
    if not isinstance(output.problem, BrokenPipeError):
        lost = f"stdout: {output.problem.strerror}: what this command has printed is incomplete"
        print(f"{Path(sys.argv[0]).name}: {lost}", file=sys.stderr, flush=True)
    return status or EXIT_ERROR


def run_command(
    script: str, run: Callable[[], int | None], interrupted: str | Callable[[], str], *, follows: bool = False
) -> int:
    """Run a command; return its exit status. A user error, and Ctrl-C with what it leaves, are one line on stderr.

    Ctrl-C also where a library makes an error of its own of it. Torch does: while weights are read, any exception in a
    storage's `__len__` becomes a ValueError about its shape. `follows`: rank 0 prints what all ranks raise.
    """
    came = []

    def interrupt(*_: object) -> None:
        came.append(True)
        raise KeyboardInterrupt

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        return run() or EXIT_DONE
    except (Exception, KeyboardInterrupt) as error:
        if came or isinstance(error, KeyboardInterrupt):
            left = interrupted if isinstance(interrupted, str) else interrupted()
            print(f"{script}: interrupted{left}", file=sys.stderr, flush=True)
            return EXIT_INTERRUPTED
        if isinstance(error, OSError) and error.filename is not None and error.errno in DISK_FULL:
            from common.files import write_error

            error = write_error(os.fsdecode(error.filename), error)
        if not isinstance(error, BadInput):
            raise
        if error.alone or not follows:
            print(*(f"{script}: {line}" for line in error.lines), sep="\n", file=sys.stderr, flush=True)
        return EXIT_ERROR
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def use_expandable_segments() -> None:
    """Enable expandable segments of torch's CUDA allocator (3 to 20 % less memory), unless the user has set it."""
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
