"""Commit log `ledger.jsonl`: the units that are in the token files, one line each, in the order of the plan.

A line is written when the unit's tokens are on the disk. What a kill leaves behind after the last complete line, in the
log or in the token files, is cut off at the next start.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from common.errors import BadInput
from common.files import sync
from common.json_files import open_regular, parse_json
from common.structure import structured
from tokens.format.header import readable_tokens
from tokens.format.manifest import Content
from tokens.format.splits import SPLITS
from tokens.prepare.encode_unit import Result

LEDGER = "ledger.jsonl"
SHOWN = 5  # examples of each kind of problem in the totals
FORMAT = 1
CRASH_POINTS = (
    "tokens written",
    "ledger written",
    "unit deleted",
    "tail copied",
    "cut noted",
    "tail cut off",
    "headers written",
    "file named",
    "all named",
    "manifest written",
)  # of a commit and of the end, in order
BUCKET_CRASH_POINTS = (
    "plan uploaded",
    "shard uploaded",
    "checkpoint written",
    "shard named",
    "ledger uploaded",
    "manifest uploaded",
    "leftover deleted",
)


def reached(point: str) -> None:
    """Do nothing: a point of the protocol at which tests kill the process."""
    assert point in (*CRASH_POINTS, *BUCKET_CRASH_POINTS), point


@attrs.frozen
class LogHead:
    """First line: the format, and the fingerprint of the plan."""

    format: int
    plan: str


@attrs.frozen
class TailCut:
    """The tail of the train stream is copied to the held-out splits: the tokens that each split has now."""

    cut: dict[str, int]


@attrs.frozen
class Uploaded:
    """A full shard is in the bucket."""

    uploaded: str  # its name there
    content: Content


Entry = Result | TailCut | Uploaded


@attrs.define(kw_only=True)
class Totals:
    """Sums over all committed units."""

    units: int = 0
    tokens: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(SPLITS, 0))
    documents: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(SPLITS, 0))
    text_bytes: int = 0
    problems: dict[str, int] = attrs.field(factory=dict)
    lost_documents: int = 0
    lost_bytes: int = 0
    examples: dict[str, list[str]] = attrs.field(factory=dict)  # the first ones, by kind

    def add(self, result: Result) -> None:
        self.units += 1
        for split, part in result.parts.items():
            self.tokens[split] += part.tokens
            self.documents[split] += part.documents
        for kind, count in result.problems.items():
            self.problems[kind] = self.problems.get(kind, 0) + count
        self.text_bytes += result.text_bytes
        self.lost_documents += result.lost_documents
        self.lost_bytes += result.lost_bytes
        for kind, lines in result.examples.items():
            kept = self.examples.setdefault(kind, [])
            kept += lines[: SHOWN - len(kept)]


@attrs.define
class Committed:
    """Sums over the entries of a commit log."""

    totals: Totals = attrs.field(factory=Totals)
    cut: dict[str, int] | None = None  # tokens of each split after the tail was cut off
    uploaded: dict[str, Content] = attrs.field(factory=dict)  # shards in a bucket, by name

    def add(self, entry: Entry) -> None:
        match entry:
            case TailCut(cut=cut):
                self.cut = cut
            case Uploaded(uploaded=name, content=content):
                self.uploaded[name] = content
            case Result():
                self.totals.add(entry)


class CommitLog:
    """The commit log of a token directory, open for appending."""

    def __init__(self, directory: Path, plan_fingerprint: str):
        """Continue a log, or begin one. Raises BadInput for a damaged one, and for that of another plan."""
        self.path = directory / LEDGER
        self.committed = Committed()
        wanted, known_bytes = LogHead(FORMAT, plan_fingerprint), 0
        if self.path.exists():
            head, known_bytes = _read_head(self.path)
            if head not in (None, wanted):
                raise BadInput(f"{self.path}: belongs to another plan; pass another --output")
            for entry, end in _entries(self.path, known_bytes):
                self.committed.add(entry)
                known_bytes = end
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        self._file.truncate(known_bytes)
        self._file.seek(known_bytes)
        if known_bytes == 0:
            self._write(wanted)
            sync(directory)

    def append(self, *entries: Entry) -> None:
        """Append entries; they are on the disk when it returns."""
        self._write(*entries)
        for entry in entries:
            self.committed.add(entry)

    def close(self) -> None:
        self._file.close()

    def _write(self, *lines: LogHead | Entry) -> None:
        for line in lines:
            self._file.write(json.dumps(attrs.asdict(line)).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read_log(directory: Path) -> Committed:
    """Return the sums over a commit log, which another process may be writing."""
    committed = Committed()
    for entry, _ in entries_after(directory / LEDGER, 0):
        committed.add(entry)
    return committed


def read_results(directory: Path) -> Iterator[Result]:
    """Yield the committed units, in order."""
    return (entry for entry, _ in entries_after(directory / LEDGER, 0) if isinstance(entry, Result))


def entries_after(path: Path, seen_bytes: int) -> Iterator[tuple[Entry, int]]:
    """Yield the complete entries of a log after its first `seen_bytes`, each with its end in bytes."""
    begin = seen_bytes or (_read_head(path)[1] if path.exists() or path.is_symlink() else 0)
    if begin:  # else the head is still being written
        yield from _entries(path, begin)


def _read_head(path: Path) -> tuple[LogHead | None, int]:
    with readable_tokens(path), open_regular(path) as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        return None, 0
    try:
        return structured(parse_json(line), LogHead), len(line)
    except ValueError as error:
        raise BadInput(f"{path}: damaged: line 1: {error}; begin anew in another --output") from error


def _entries(path: Path, begin: int) -> Iterator[tuple[Entry, int]]:
    """Yield the complete entries from a position on, each with its end in bytes."""
    with path.open("rb") as file:
        file.seek(begin)
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                return  # a kill while it was written
            begin += len(line)
            try:
                yield _entry(parse_json(line)), begin
            except ValueError as error:
                raise BadInput(f"{path}: damaged: line {number}: {error}; begin anew in another --output") from error


def _entry(values: dict[str, object]) -> Entry:
    if "uploaded" in values:
        return structured(values, Uploaded)
    if "cut" not in values:
        result = structured(values, Result)
        if not result.parts.keys() <= set(SPLITS):
            raise ValueError(f"parts: got {', '.join(result.parts)}, wanted {', '.join(SPLITS)}")
        return result
    cut = structured(values, TailCut)
    if not cut.cut.keys() >= set(SPLITS):
        raise ValueError(f"cut: got {', '.join(cut.cut)}, wanted {', '.join(SPLITS)}")
    return cut
