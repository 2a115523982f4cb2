"""Installation check, guarded stdout and stderr, CUDA allocator setting: called first in a script, before torch."""

import errno
import fcntl
import importlib.util
import io
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, BadInput, UsageError, drop

# What training imports.
PACKAGES = ("attrs", "cattrs", "cyclopts", "jaxtyping", "matplotlib", "numpy", "safetensors", "torch", "tqdm")
# Names of one setting: since torch 2.9, and before.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # of a write, for which the user has to make room
READER_SECONDS = 5.0  # to wait for a log's reader that has stopped, such as a paused terminal


class Output(io.FileIO):
    """Bytes of stdout or stderr. Writing never raises: lost bytes are noted once."""

    def __init__(self, name: str, number: int):
        super().__init__(number, "w", closefd=False)
        self._name = name
        self.problem: OSError | None = None  # the first
        self.patience_seconds: float | None = None  # with a reader that has stopped; None: no limit
        self._waits = True

    def write(self, data: Any) -> int:
        """Write all, or drop the rest."""
        rest = memoryview(data).cast("B")
        try:
            while rest:
                self._wait_for_room()
                rest = rest[os.write(self.fileno(), rest[: select.PIPE_BUF]) :]
        except OSError as error:
            self.problem = self.problem or error
            drop(self._name, error.strerror or str(error))
        return memoryview(data).nbytes

    def _wait_for_room(self) -> None:
        """Wait until the reader of a pipe or terminal leaves room for PIPE_BUF bytes; once it has stopped, no more."""
        if fcntl.fcntl(self.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:  # a file of ours, say a checkpoint, has it now
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        room = select.poll()
        room.register(self.fileno(), select.POLLOUT)
        patience = self.patience_seconds
        if not room.poll(None if patience is None else patience * 1000 * self._waits):
            self._waits = False
            raise OSError(errno.ETIMEDOUT, "its reader has stopped")
        self._waits = True


class GuardedStream(io.TextIOWrapper):
    """Text of stdout or stderr. It escapes what it cannot encode, such as a file name that is not UTF-8."""

    def __init__(self, output: Output, replaced: Any):
        self.output = output
        self.replaced = replaced  # which, collected, would close the descriptor
        super().__init__(
            io.BufferedWriter(output),
            getattr(replaced, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=getattr(replaced, "line_buffering", False) or getattr(replaced, "write_through", False),
        )

    def close(self) -> None:
        self.flush()


def prepare_process(script: str) -> None:
    """Guard stdout and stderr; exit with one line of error when packages are missing; else configure the allocator."""
    guard_outputs()
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        made = (Path(__file__).parents[1] / ".venv" / "bin" / "activate").is_file()
        advice = "source .venv/bin/activate" if made else "make install && source .venv/bin/activate"
        sys.exit(f"{script}: this Python, {sys.executable}, has no module {missing[0]}; run: {advice}")
    use_expandable_segments()


def guard_outputs() -> None:
    """Replace stdout and stderr, once, by streams that drop what they cannot write; a closed one becomes /dev/null."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
    sys.stdout, sys.stderr = _guarded("stdout", sys.stdout, 1), _guarded("stderr", sys.stderr, 2)


def keep_logs_only() -> None:
    """Declare that files are this command's product: lost output is no error, and no reader is waited for long."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, GuardedStream):
            stream.output.patience_seconds = READER_SECONDS


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


def _guarded(name: str, stream: Any, number: int) -> Any:
    """Return the guarded form of this process's own stream; any other, such as a test's, as it is."""
    if isinstance(stream, GuardedStream):
        return stream
    with suppress(OSError, ValueError):  # without a descriptor, or closed
        if stream is None or stream.fileno() == number:
            return GuardedStream(Output(name, number), stream)
    return stream
