"""Parsing of untrusted JSON and JSON Lines within bounds on size and depth, append-only logs, record timestamps."""

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

DEPTH = 100  # most levels of nested arrays and objects
FILE_BYTES, LINES_BYTES = 1 << 26, 1 << 40  # largest JSON file, largest JSON Lines file
PENDING_BYTES = 1 << 24  # most bytes of unwritten lines kept in memory
LEAST, LARGEST = 1e-45, 1e39  # smallest and largest size of a float, other than 0: fp32 has those between
SIZES = f"0, or a number of size {LEAST:g} to {LARGEST:g}"
_KINDS: dict[type, str] = {dict: "an object of keys and values", list: "an array"}


def parse_json(text: str | bytes, kind: type | None = dict, *, unique: bool = True) -> Any:
    """Return a JSON value whose top level is a dict or list (`kind`; None: any).

    Raises ValueError for bytes that are not UTF-8, a value of another kind, one nested deeper than DEPTH, or a key that
    an object gives twice; with `unique` False the last one counts.
    """
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = (_UNIQUE if unique else _ANY).decode(decoded)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start:,}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno:,}, column {error.colno:,}") from error
    except RecursionError as error:
        raise ValueError(f"nested deeper than {DEPTH}") from error
    if decoded.count("[") + decoded.count("{") > DEPTH and _deeper_than(value, DEPTH):
        raise ValueError(f"nested deeper than {DEPTH}")
    if kind is not None and not isinstance(value, kind):
        raise InvalidValue(Problem(found=quoted(value), expected=_KINDS[kind]))
    return value


def check_text(text: str, where: str) -> None:
    """Raise BadInput for a text that UTF-8 cannot hold: JSON and command lines may give half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"half a surrogate pair at character {error.start:,}"
        raise BadInput(Problem(where=where, found=found, advice="write it in UTF-8")) from error


def utc_now() -> str:
    """Return date and time in UTC, ISO 8601, to the second."""
    return utc_time(None)


def utc_time(seconds: float | None) -> str:
    """Return a time since the epoch in UTC, ISO 8601, to the second; None: now."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def read_json(path: Path, kind: type | None = dict, *, advice: str = "", most_bytes: int = FILE_BYTES) -> Any:
    """Return the value of a regular JSON file, as `parse_json` does. Raises BadInput with `advice` at its end."""
    with refusing(path, advice):
        return parse_json(_content(path, most_bytes, advice), kind)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError for a pipe (without waiting for a writer), a device or a folder."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def open_descriptor(path: Path, flags: int) -> int:
    """Open a regular file as os.open does. Raises OSError as `open_regular`."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    kinds = {stat.S_ISDIR: "folder", stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket"}
    kind = next((name for is_kind, name in kinds.items() if is_kind(mode)), "device")
    raise OSError(f"is a {kind}, wanted a regular file")


def read_regular(path: Path, most_bytes: int = FILE_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError for any other kind and for more than `most_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(f"got {size:,} bytes, wanted at most {most_bytes:,}")
        try:
            return file.read()
        except MemoryError as error:
            raise OSError(f"got {size:,} bytes, more than the memory holds") from error


class JsonLines(NamedTuple):
    """Records of a JSON Lines file, and which lines are left out: torn by a kill, or damaged."""

    path: Path
    records: list[Any]  # as parsed
    damaged: list[int]  # numbers of the lines left out; the first line is 1
    ends_torn: bool  # the last line is damaged and has no end: it may be in the middle of being written
    ends_damaged: bool = False  # the last line is damaged

    def notes(self, *, growing: bool = False) -> list[Notice]:
        """Return a note on the lines left out, if there are any; `growing`: the last one may be unfinished."""
        damaged = self.damaged[:-1] if growing and self.ends_torn else self.damaged
        count = "1 line" if len(damaged) == 1 else f"{len(damaged):,} lines"
        return [note(f"{self.path}: left out as damaged: {count}, from line {damaged[0]:,} on")] if damaged else []

    def noted(self) -> list[Any]:
        """Return the records, after notes on stderr."""
        for notice in self.notes():
            show(notice)
        return self.records


def read_json_lines(path: Path, parse: Callable[[dict[str, Any]], Any] = dict, *, containing: bytes = b"") -> JsonLines:
    """Return the objects of an append-only file as `parse` returns them, without damaged lines; none without a file.

    Damaged is also a line for which `parse` returns None or raises ValueError. `containing`: of the lines with these
    bytes only, which is quicker. Raises BadInput when the file cannot be read at all.
    """
    exists = path.exists() or path.is_symlink()
    content = _content(path, LINES_BYTES, "move it away, or fix this") if exists else b""
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
    """Tell whether a value is an int of 64 bits or a float in fp32's range, whose squares are finite; no bool."""
    if type(value) is int:
        return abs(value) < 1 << 64
    return type(value) is float and (value == 0 or LEAST <= abs(value) <= LARGEST)


def scalars_in(value: Any) -> Iterator[Any]:
    """Yield the numbers, strings, booleans and nulls in a JSON value, at any depth; keys are none."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from scalars_in(item)
    else:
        yield value


def read_every_line(path: Path, *, advice: str = "") -> list[dict[str, Any]]:
    """Return all objects of a JSON Lines input. Raises BadInput, with `advice`, for an unreadable line or file."""
    records = []
    for number, line in _lines(_content(path, LINES_BYTES, advice)):
        with refusing(f"{path}: line {number}", advice):
            records.append(parse_json(line))
    return records


class JsonLog:
    """An append-only JSON Lines file. The record after a torn line begins on a new line."""

    def __init__(self, path: Path):
        """Open or create it. Raises OSError, also where the path is not a regular file."""
        self.path = path
        descriptor = open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self.file = os.fdopen(descriptor, "wb", buffering=0)
        last = os.pread(descriptor, 1, max(0, os.fstat(descriptor).st_size - 1))
        self._pending = b"" if last in (b"", b"\n") else b"\n"
        self._dropped = 0  # lines

    def append(self, record: dict[str, Any], *, durable: bool = False) -> None:
        """Append one object; `durable`: sync it. Raises OSError; the next call retries up to PENDING_BYTES."""
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
        """Write pending lines. Raises OSError."""
        try:
            while self._pending:
                self._pending = self._pending[self.file.write(self._pending) :]
        except OSError as error:
            error.filename = os.fspath(self.path)  # the system names none when a disk is full
            raise

    @property
    def unwritten(self) -> int:
        """Number of lines that are missing from the file, or incomplete."""
        return self._dropped + len([line for line in self._pending.split(b"\n") if line])

    def close(self) -> None:
        """Close the file; pending lines are lost."""
        self.file.close()


def _content(path: Path, most_bytes: int, advice: str) -> bytes:
    with refusing(f"{path}: cannot be read", advice, (OSError,)):
        return read_regular(path, most_bytes)


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of the lines that are not blank; the first number is 1."""
    return ((number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip())


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = next(key for key in counts if counts[key] > 1)
        raise InvalidValue(Problem(key=key, text=f"key {quoted(key)} is given twice"))
    return values


_UNIQUE = json.JSONDecoder(object_pairs_hook=_without_duplicates)
_ANY = json.JSONDecoder()  # json.loads makes one a call


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return bool(level)
