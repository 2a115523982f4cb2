"""Parse untrusted JSON and JSON Lines with limits on size and depth, append to logs, and write timestamps."""

import json
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from common.errors import BadInput, InvalidValue, Problem, refusing
from common.output import Notice, note, show
from common.text import quoted

DEPTH = 100  # maximum number of levels of nested arrays and objects
FILE_BYTES, LINES_BYTES = 1 << 26, 1 << 40  # maximum size of a JSON file, and of a JSON Lines file
PENDING_BYTES = 1 << 24  # maximum size of the unwritten lines that are kept in memory
LEAST, LARGEST = 1e-45, 1e39  # limits for the magnitude of a float other than 0; fp32's range lies within them
SIZES = f"0, or a number of magnitude {LEAST:g} to {LARGEST:g}"
_KINDS: dict[type, str] = {dict: "an object of keys and values", list: "an array"}


def parse_json(text: str | bytes, kind: type | None = dict, *, unique: bool = True) -> Any:
    """Parse JSON. `kind` is the required type of the top level: dict, list, or None for any type.

    Raises ValueError for bytes that are not UTF-8, a value of another kind, a value nested deeper than DEPTH, and a key
    that occurs twice in an object. If `unique` is False, a repeated key is allowed, and its last value is used.
    """
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = (_UNIQUE if unique else _ANY).decode(decoded)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start:,}") from error
    except json.JSONDecodeError as error:
        # For example: not JSON at line 3, column 5 (Expecting ',' delimiter)
        raise ValueError(f"not JSON at line {error.lineno:,}, column {error.colno:,} ({error.msg})") from error
    except RecursionError as error:
        raise ValueError(f"nested deeper than {DEPTH}") from error
    if decoded.count("[") + decoded.count("{") > DEPTH and _deeper_than(value, DEPTH):
        raise ValueError(f"nested deeper than {DEPTH}")
    if kind is not None and not isinstance(value, kind):
        raise InvalidValue(Problem(found=quoted(value), expected=_KINDS[kind]))
    return value


def check_text(text: str, where: str) -> None:
    """Raise BadInput if a text cannot be encoded as UTF-8. JSON and command lines can contain half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half_pair = f"half a surrogate pair at character {error.start:,}"
        raise BadInput(Problem(where=where, found=half_pair, advice="write it in UTF-8")) from error


def utc_now() -> str:
    """Return the current date and time in UTC, in ISO 8601, to the second."""
    return utc_time(None)


def utc_time(seconds: float | None) -> str:
    """Format a time, given in seconds since the epoch, as ISO 8601 in UTC, to the second. None means now."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def read_json(path: Path, kind: type | None = dict, *, advice: str = "", most_bytes: int = FILE_BYTES) -> Any:
    """Read a regular JSON file and return its value, as `parse_json` does.

    Raises BadInput for an invalid or unreadable file. Its message ends with `advice`.
    """
    with refusing(path, advice):
        return parse_json(_content(path, most_bytes, advice), kind)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError for a pipe (without waiting for a writer), a device or a folder."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def open_descriptor(path: Path, flags: int) -> int:
    """Open a regular file as os.open does. Raises OSError for other kinds of files, as `open_regular` does."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    kinds = {stat.S_ISDIR: "folder", stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket"}
    kind = next((name for is_kind, name in kinds.items() if is_kind(mode)), "device")
    raise OSError(f"is a {kind}, wanted a regular file")


def read_regular(path: Path, most_bytes: int = FILE_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError for other kinds of files, or for more than `most_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(f"got {size:,} bytes, wanted at most {most_bytes:,}")
        try:
            return file.read()
        except MemoryError as error:
            raise OSError(f"got {size:,} bytes, which do not fit in memory") from error


class JsonLines(NamedTuple):
    """The records of a JSON Lines file, and the lines that were skipped because they are damaged or incomplete."""

    path: Path
    records: list[Any]  # as returned by the parser
    damaged: list[int]  # numbers of the skipped lines; the first line is 1
    ends_torn: bool  # the last line is damaged and has no newline: another process may still be writing it
    ends_damaged: bool = False  # the last line is damaged

    def notes(self, *, growing: bool = False) -> list[Notice]:
        """Return a note about the skipped lines, if there are any.

        With `growing`, another process may be writing the file, so an unfinished last line is not mentioned.
        """
        damaged = self.damaged[:-1] if growing and self.ends_torn else self.damaged
        count = "1 damaged line, at" if len(damaged) == 1 else f"{len(damaged):,} damaged lines, starting at"
        return [note(f"{self.path}: skipped {count} line {damaged[0]:,}")] if damaged else []

    def noted(self) -> list[Any]:
        """Print the notes about skipped lines on stderr, and return the records."""
        for notice in self.notes():
            show(notice)
        return self.records


def read_json_lines(path: Path, parse: Callable[[dict[str, Any]], Any] = dict, *, containing: bytes = b"") -> JsonLines:
    """Read an append-only JSON Lines file; each record is what `parse` returns for the object on a line.

    Damaged lines are skipped; a line for which `parse` returns None or raises ValueError counts as damaged. A file that
    does not exist has no records. With `containing`, only the lines that contain these bytes are parsed, which is
    faster. Raises BadInput if the file cannot be read at all.
    """
    exists = path.exists() or path.is_symlink()
    content = _content(path, LINES_BYTES, "move it away, or fix it") if exists else b""
    records, damaged, last = [], [], 0
    for number, line in _lines(content):
        if containing not in line:
            continue
        last = number
        try:
            record = None if len(line) > FILE_BYTES else parse(parse_json(line))
        except ValueError:
            record = None
        if record is None:
            damaged.append(number)
        else:
            records.append(record)
    ends_damaged = last in damaged[-1:]
    ends_torn = ends_damaged and not content.endswith(b"\n")
    return JsonLines(path, records, damaged, ends_torn=ends_torn, ends_damaged=ends_damaged)


def is_number(value: Any) -> bool:
    """Return whether a value is an int of at most 64 bits, or a float in fp32's range.

    The squares of such numbers are finite. A bool is not a number.
    """
    if type(value) is int:
        return abs(value) < 1 << 64
    return type(value) is float and (value == 0 or LEAST <= abs(value) <= LARGEST)


def scalars_in(value: Any) -> Iterator[Any]:
    """Yield the numbers, strings, booleans and nulls in a JSON value, at any depth. Keys are not included."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from scalars_in(item)
    else:
        yield value


def read_every_line(path: Path, *, advice: str = "") -> list[dict[str, Any]]:
    """Return the objects of all lines of a user's JSON Lines file.

    Raises BadInput, with `advice`, if the file or any line cannot be read.
    """
    records = []
    for number, line in _lines(_content(path, LINES_BYTES, advice)):
        with refusing(f"{path}: line {number}", advice):
            records.append(parse_json(line))
    return records


class JsonLog:
    """An append-only JSON Lines file. If a kill has left half a line at its end, the next record starts a new line."""

    def __init__(self, path: Path):
        """Open or create the file. Raises OSError if that fails or if the path is not a regular file."""
        self.path = path
        descriptor = open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self.file = os.fdopen(descriptor, "wb", buffering=0)
        last_byte = os.pread(descriptor, 1, max(0, os.fstat(descriptor).st_size - 1))
        self._pending = b"" if last_byte in (b"", b"\n") else b"\n"
        self._dropped = 0  # lines

    def append(self, record: dict[str, Any], *, durable: bool = False) -> None:
        """Append one object. `durable` also syncs it to the disk.

        Raises OSError if the line cannot be written. The line is then kept, and the next call tries again to write it;
        at most PENDING_BYTES are kept.
        """
        line = json.dumps(record).encode() + b"\n"
        if len(self._pending) + len(line) > PENDING_BYTES:
            self._dropped += 1
            self.flush()
            self._dropped -= 1
        self._pending += line
        self.flush()
        if durable:
            os.fsync(self.file.fileno())

    def flush(self) -> None:
        """Write the lines that an earlier call could not write. Raises OSError."""
        try:
            while self._pending:
                self._pending = self._pending[self.file.write(self._pending) :]
        except OSError as error:
            error.filename = os.fspath(self.path)  # the system names no file when a disk is full
            raise

    @property
    def unwritten(self) -> int:
        """The number of lines that the file does not contain, or contains only in part."""
        return self._dropped + len([line for line in self._pending.split(b"\n") if line])

    def close(self) -> None:
        """Close the file. Lines that could not be written are lost."""
        self.file.close()


def _content(path: Path, most_bytes: int, advice: str) -> bytes:
    with refusing(f"{path}: cannot be read", advice, (OSError,)):
        return read_regular(path, most_bytes)


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Return an iterator over (number, line) of each line that is not blank. The first line has the number 1."""
    return ((number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip())


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = next(key for key in counts if counts[key] > 1)
        raise InvalidValue(Problem(key=key, text=f"key {quoted(key)} is given twice"))
    return values


_UNIQUE = json.JSONDecoder(object_pairs_hook=_without_duplicates)
_ANY = json.JSONDecoder()  # shared by all calls; json.loads with options would create a decoder per call


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return bool(level)
