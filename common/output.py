"""Output: lines for people, work whose failure must not end the run, and stdout and stderr that never fail."""

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

READER_SECONDS = 5.0  # how long to wait if a log's reader, such as a paused terminal, has stopped reading

_dropped: dict[str, str | None] = {}  # kind of work -> its first problem; None if that has already been reported


class Severity(Enum):
    """The importance of a line. It determines where the line is printed and with which label."""

    RESULT = "result"  # the command's product, printed on stdout; all other lines are printed on stderr
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
    """Return a notice about the progress of a command that takes a long time."""
    return Notice(text, Severity.PROGRESS)


def note(text: str) -> Notice:
    """Return a notice of something that the user might not expect."""
    return Notice(text, Severity.NOTE)


def warning(text: str) -> Notice:
    """Return a notice of something that is probably wrong, but does not end the command."""
    return Notice(text, Severity.WARNING)


def show(*lines: str | Notice, once: bool = False) -> None:
    """Print lines for people. This is the only way to print, and all decisions about printing are made here.

    A plain string is a result and is printed on stdout. The severity of a notice determines its label. All notices
    except results are printed on stderr, and secrets in them are hidden. Each argument is printed as one line: control
    characters, which file names may contain, are escaped. A progress bar stays below the lines. Output that cannot be
    written raises no error.

    With `once`, only rank 0 of a job prints, whether or not the other ranks call this too. Without it, every process
    that calls this prints.
    """
    if once and not is_rank_0():
        return
    for line in lines:
        if isinstance(line, Notice) and line.severity is not Severity.RESULT:
            _print(printable(redacted(str(line))), sys.stderr)
        else:
            _print(printable(str(line)), sys.stdout)


def is_rank_0() -> bool:
    """Return whether this process is rank 0, which prints for all ranks. Without torchrun it always is."""
    rank = os.environ.get("RANK", "0")
    return not rank.isdecimal() or int(rank) == 0  # a RANK that is not a number is an error that every rank prints


def _print(line: str, stream: TextIO) -> None:
    """Print a line, above the progress bar if there is one."""
    bar = getattr(sys.modules.get("tqdm"), "tqdm", None)  # a process without a progress bar has not imported tqdm
    if bar is None:
        print(line, file=stream)
    else:
        bar.write(line, file=stream)
    stream.flush()


@contextmanager
def advisory(name: str, *fatal: type[Exception]) -> Iterator[None]:
    """A context manager, or a decorator, for work whose failure must not end the run.

    The first exception is reported as a warning and the rest are ignored; exceptions of the `fatal` types are raised.
    """
    try:
        yield
    except fatal:
        raise
    except Exception as error:  # noqa: BLE001  # training must continue, whatever is wrong with a line or a chart
        line = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__} in {Path(line.filename).name}:{line.lineno}: {error}"
        if drop(name, problem):
            show(warning(f"{name}: dropped: {problem}"))


def drop(name: str, problem: str) -> bool:
    """Record, for the metrics, why work of the kind `name` was dropped. Only the first problem of a kind is recorded.

    Return whether this was the first problem of this kind.
    """
    first = name not in _dropped
    _dropped.setdefault(name, redacted(problem))
    return first


def newly_dropped() -> Iterator[tuple[str, str]]:
    """Yield (name, problem) for work that was dropped since the last call."""
    for name, problem in [*_dropped.items()]:
        if problem is not None:
            _dropped[name] = None
            yield name, problem


class Output(io.FileIO):
    """The bytes of stdout or stderr. Writing never raises an error; instead, the first problem is recorded."""

    def __init__(self, name: str, number: int):
        super().__init__(number, "w", closefd=False)
        self._name = name
        self.problem: OSError | None = None  # the first problem
        self.patience_seconds: float | None = None  # how long to wait for a reader that has stopped; None: no limit
        self._waits = True

    def write(self, data: Any) -> int:
        """Write the bytes. Bytes that cannot be written are dropped."""
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
        """Wait until a pipe or terminal has room for PIPE_BUF bytes.

        If its reader has stopped, raise OSError after `patience_seconds`. Later calls raise the error without
        waiting, until the reader continues.
        """
        # If other code has closed our descriptor, its number may now belong to another file, such as a checkpoint.
        if fcntl.fcntl(self.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        room = select.poll()
        room.register(self.fileno(), select.POLLOUT)
        patience = self.patience_seconds
        if not room.poll(None if patience is None else patience * 1000 * self._waits):
            self._waits = False
            raise OSError(errno.ETIMEDOUT, "its reader has stopped")
        self._waits = True


class GuardedStream(io.TextIOWrapper):
    """The text of stdout or stderr. Characters that cannot be encoded, as in a file name, are escaped."""

    def __init__(self, output: Output, replaced: Any):
        self.output = output
        self.replaced = replaced  # kept: if it were garbage-collected, its descriptor would be closed
        super().__init__(
            io.BufferedWriter(output),
            getattr(replaced, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=getattr(replaced, "line_buffering", False) or getattr(replaced, "write_through", False),
        )

    def close(self) -> None:
        self.flush()


def guard_outputs() -> None:
    """Replace stdout and stderr with streams that drop output that cannot be written. A second call changes nothing.

    A standard stream that is closed is replaced with /dev/null.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open returns the lowest free number
    sys.stdout, sys.stderr = _guarded("stdout", sys.stdout, 1), _guarded("stderr", sys.stderr, 2)


def keep_logs_only() -> None:
    """Declare that this command produces files, and that what it prints is only a log.

    Lost output is then not an error, and the command does not wait long for a reader that has stopped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, GuardedStream):
            stream.output.patience_seconds = READER_SECONDS


def _guarded(name: str, stream: Any, number: int) -> Any:
    """Return a guarded stream for this process's own stdout or stderr. Other streams, as in tests, are not replaced."""
    if isinstance(stream, GuardedStream):
        return stream
    with suppress(OSError, ValueError):  # the stream may have no descriptor, or be closed
        if stream is None or stream.fileno() == number:
            return GuardedStream(Output(name, number), stream)
    return stream
