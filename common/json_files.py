"""JSON from outside: files that people edit, other tools write or a disk damages, and append-only JSON Lines.

All that the project reads as JSON is parsed here, but for records of documents (tokens/documents/reader.py, for speed).
There are bounds on size, depth and repetition, so that damage becomes one line of error and never a traceback, a hang
or a value that silently hides another.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from common.errors import BadInput, quoted

DEPTH = 100  # arrays and objects inside each other
FILE_BYTES = 1 << 26
PENDING_BYTES = 1 << 24  # of lines that could not be written, kept in memory
_KINDS: dict[type, str] = {dict: "an object of keys and values", list: "an array"}


def parse_json(text: str | bytes, kind: type | None = dict, *, unique: bool = True) -> Any:
    """Return a JSON value whose top is a dict or list (`kind`; None: any).

    Raises ValueError for bytes that are not UTF-8, a value of another kind, one nested deeper than DEPTH, or a key that
    an object gives twice; with `unique` False the last one counts.
    """
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(decoded, object_pairs_hook=_without_duplicates if unique else None)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start:,}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"nested deeper than {DEPTH}") from error
    if decoded.count("[") + decoded.count("{") > DEPTH and _deeper_than(value, DEPTH):
        raise ValueError(f"nested deeper than {DEPTH}")
    if kind is not None and not isinstance(value, kind):
        raise ValueError(f"got {quoted(value)}, wanted {_KINDS[kind]}")
    return value


def read_json(path: Path, kind: type | None = dict, *, advice: str = "", most_bytes: int = FILE_BYTES) -> Any:
    """Return what a JSON file holds, as `parse_json` does.

    Raises BadInput, with `advice` at its end, for a file that is missing, unreadable, no regular file (opening a pipe
    would wait for ever), larger than `most_bytes`, or no such JSON.
    """
    advice = f"; {advice}" if advice else ""
    try:
        return parse_json(read_regular(path, most_bytes), kind)
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file{advice}") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}{advice}") from error
    except ValueError as error:
        raise BadInput(f"{path}: {error}{advice}") from error


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError for a pipe, whose opening would otherwise wait, a device or a folder."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def open_descriptor(path: Path, flags: int) -> int:
    """Open a regular file as os.open does, without waiting. Raises OSError for any other kind, as `open_regular`."""
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
    """The objects of a JSON Lines file, and how many of its lines hold none: torn by a kill, or damaged."""

    records: list[dict[str, Any]]
    unreadable: int


def read_json_lines(path: Path) -> JsonLines:
    """Return the objects of an append-only file; none where there is no file.

    Raises BadInput when it cannot be read at all.
    """
    try:
        content = read_regular(path, most_bytes=1 << 40) if path.exists() or path.is_symlink() else b""
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}; move it away, or fix this") from error
    records, unreadable = [], 0
    for line in content.split(b"\n"):
        if line.strip():
            try:
                records.append(parse_json(line))
            except ValueError:
                unreadable += 1
    return JsonLines(records, unreadable)


def read_every_line(path: Path, *, advice: str = "", most_bytes: int = 1 << 40) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file that is an input, where no line may be missing.

    Raises BadInput, with `advice` at its end, naming the line that is damaged, or why the file cannot be read.
    """
    advice = f"; {advice}" if advice else ""
    try:
        content = read_regular(path, most_bytes)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}{advice}") from error
    records = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                records.append(parse_json(line))
            except ValueError as error:
                raise BadInput(f"{path}: line {number}: {error}{advice}") from error
    return records


class JsonLog:
    """An append-only JSON Lines file. A line that a kill has torn stays, and the next begins on a line of its own."""

    def __init__(self, path: Path):
        """Open it, or make it. Raises OSError, for what is no regular file as well."""
        self.path = path
        descriptor = open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.file = os.fdopen(descriptor, "wb", buffering=0)
        self._pending = b"\n" if _ends_torn(path) else b""
        self._dropped = 0  # lines

    def append(self, record: dict[str, Any], *, durable: bool = False) -> None:
        """Append one object; `durable`: wait until it is on the disk.

        Raises OSError; what was not written is kept in memory, up to PENDING_BYTES, and written by the next call that
        can.
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
        """Write what an earlier call could not. Raises OSError."""
        while self._pending:
            self._pending = self._pending[self.file.write(self._pending) :]

    @property
    def unwritten(self) -> int:
        """Lines that are not in the file, or not whole."""
        return self._dropped + len([line for line in self._pending.split(b"\n") if line])

    def close(self) -> None:
        """Close the file; what could not be written is lost."""
        self.file.close()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {quoted(key)} is given twice")
            seen.add(key)
    return values


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return bool(level)


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
