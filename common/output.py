"""Output: lines for people, work whose failure ends nothing, and stdout and stderr that never fail."""

import errno
import fcntl
import io
import os
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from common.redaction import redacted
from common.text import printable

READER_SECONDS = 5.0  # to wait for a log's reader that has stopped, such as a paused terminal

_dropped: dict[str, str | None] = {}  # first problem of each kind of output or advice; None: reported


class Severity(Enum):
    """Importance of a line. It alone decides where the line is printed, and with which label."""

    RESULT = "result"  # what the command was asked for: printed on stdout, all others on stderr
    PROGRESS = "progress"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"  # why a command ends


_LABELS = {Severity.NOTE: "NOTE: ", Severity.WARNING: "WARNING: "}


@dataclass(frozen=True)
class Notice:
    """A line for people. `str` returns it with its label."""

    text: str
    severity: Severity

    def __str__(self) -> str:
        return _LABELS.get(self.severity, "") + self.text


def progress(text: str) -> Notice:
    """Return a notice about the progress of a command that takes long."""
    return Notice(text, Severity.PROGRESS)


def note(text: str) -> Notice:
    """Return a notice of something that the user might not expect."""
    return Notice(text, Severity.NOTE)


def warning(text: str) -> Notice:
    """Return a notice of something that is probably wrong, but does not end the command."""
    return Notice(text, Severity.WARNING)


def show(*lines: str | Notice, once: bool = False) -> None:
    """Print lines for people. This is the only way to print, and all that concerns printing is decided here.

    A plain text is a result, for stdout. The severity of a notice decides on its label; all notices but results are
    printed on stderr, and secrets in them are hidden. Each argument is printed as one line: control characters, such as
    those in names of files, are escaped. A progress bar stays below the lines. Nothing is raised for output that is
    lost.

    `once`: every rank of a job calls this, or only rank 0 does, and rank 0 prints. Otherwise this process prints.
    """
    if once and not is_rank_0():
        return
    for line in lines:
        if isinstance(line, Notice) and line.severity is not Severity.RESULT:
            _print(printable(redacted(str(line))), sys.stderr)
        else:
            _print(printable(str(line)), sys.stdout)


def is_rank_0() -> bool:
    """Return whether this process is rank 0 of its job, which prints for all; without torchrun it always is."""
    rank = os.environ.get("RANK", "0")
    return not rank.isdecimal() or int(rank) == 0  # a launcher's wrong value is an error that each rank prints


def _print(line: str, stream: TextIO) -> None:
    """Print a line; with a progress bar, above it."""
    bar = getattr(sys.modules.get("tqdm"), "tqdm", None)  # a process that has no bar has not imported it
    if bar is None:
        print(line, file=stream)
    else:
        bar.write(line, file=stream)
    stream.flush()


@contextmanager
def advisory(name: str, *fatal: type[Exception]) -> Iterator[None]:
    """Context, or decorator, of work that informs: its exceptions, but `fatal` ones, are noted once and end nothing."""
    try:
        yield
    except fatal:
        raise
    except Exception as error:  # noqa: BLE001  # of formatting, arithmetic, a drawing: training goes on without
        line = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__} in {Path(line.filename).name}:{line.lineno}: {error}"
        if drop(name, problem):
            show(warning(f"{name}: dropped: {problem}"))


def drop(name: str, problem: str) -> bool:
    """Note once, for the metrics, dropped work and the reason; return True the first time."""
    first = name not in _dropped
    _dropped.setdefault(name, redacted(problem))
    return first


def newly_dropped() -> Iterator[tuple[str, str]]:
    """Yield (name, problem) of work dropped since the last call."""
    for name, problem in [*_dropped.items()]:
        if problem is not None:
            _dropped[name] = None
            yield name, problem


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


def _guarded(name: str, stream: Any, number: int) -> Any:
    """Return the guarded form of this process's own stream; any other, such as a test's, as it is."""
    if isinstance(stream, GuardedStream):
        return stream
    with suppress(OSError, ValueError):  # without a descriptor, or closed
        if stream is None or stream.fileno() == number:
            return GuardedStream(Output(name, number), stream)
    return stream
