"""Commit log `ledger.jsonl`: a line for each unit, in the order of the plan, once its tokens are on the disk.

What a kill leaves after the last complete line, in the log or in the token files, is cut off at the next start.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from common.checks import structured
from common.errors import BadInput
from common.files import naming, sync
from common.json_files import open_regular, parse_json
from tokens.format.header import readable_tokens
from tokens.format.manifest import SPLITS, Content
from tokens.prepare.encode_unit import Result

COMMITS = "ledger.jsonl"
SHOWN = 5  # examples of each kind of problem in the totals
FORMAT = 1


def reached(point: str) -> None:
    """Do nothing: a point of the protocol at which tests kill the process."""


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


Entry = LogHead | Result | TailCut | Uploaded


@attrs.define(kw_only=True)
class Totals:
    """Sums over the entries of a commit log."""

    units: int = 0
    tokens: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(SPLITS, 0))
    documents: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(SPLITS, 0))
    empty_documents: int = 0  # of these
    counted: int = 0  # tokens of conversations that count in the loss
    padding: int = 0  # tokens
    text_bytes: int = 0
    problems: Counter[str] = attrs.field(factory=Counter)
    lost_documents: int = 0
    lost_bytes: int = 0
    examples: dict[str, list[str]] = attrs.field(factory=dict)  # the first ones, by kind
    cut: dict[str, int] | None = None  # tokens of each split after the tail was cut off
    uploaded: dict[str, Content] = attrs.field(factory=dict)  # shards in a bucket, by name

    def add(self, entry: Entry) -> None:
        match entry:
            case TailCut():
                self.cut = entry.cut
            case Uploaded():
                self.uploaded[entry.uploaded] = entry.content
            case Result():
                self.units += 1
                for split, part in entry.parts.items():
                    self.tokens[split] += part.tokens
                    self.documents[split] += part.documents
                    self.empty_documents += part.empty_documents
                    self.counted += part.counted
                    self.padding += part.padding
                self.problems.update(entry.problems)
                self.text_bytes += entry.text_bytes
                self.lost_documents += entry.lost_documents
                self.lost_bytes += entry.lost_bytes
                for kind, lines in entry.examples.items():
                    kept = self.examples.setdefault(kind, [])
                    kept += lines[: SHOWN - len(kept)]


class CommitLog:
    """The commit log of a token directory, open for appending."""

    def __init__(self, directory: Path, plan_fingerprint: str):
        """Continue a log, or begin one. Raises BadInput for a damaged one, and for that of another plan."""
        self.path = directory / COMMITS
        self.totals = Totals()
        head, known_bytes = LogHead(FORMAT, plan_fingerprint), 0
        for entry, end in entries_after(self.path, 0):
            known_bytes = end
            if isinstance(entry, LogHead) and entry != head:
                raise BadInput(f"{self.path}: belongs to another plan; pass another --output")
            self.totals.add(entry)
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        with naming(self.path):
            self._file.truncate(known_bytes)
        self._file.seek(known_bytes)
        if known_bytes == 0:
            self.append(head)
            sync(directory)

    def append(self, *entries: Entry) -> None:
        """Append entries; they are on the disk when it returns."""
        with naming(self.path):
            for entry in entries:
                self._file.write(json.dumps(attrs.asdict(entry)).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        for entry in entries:
            self.totals.add(entry)

    def close(self) -> None:
        with naming(self.path):
            self._file.close()


def read_log(directory: Path) -> Totals:
    """Return the sums over a commit log, which another process may be writing."""
    totals = Totals()
    for entry, _ in entries_after(directory / COMMITS, 0):
        totals.add(entry)
    return totals


def entries_after(path: Path, seen_bytes: int) -> Iterator[tuple[Entry, int]]:
    """Yield the complete entries of a log after its first `seen_bytes`, each with its end in bytes."""
    if not path.exists() and not path.is_symlink():
        return
    with readable_tokens(path), open_regular(path) as file:
        first = file.seek(seen_bytes) == 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # a kill while it was written
            seen_bytes += len(line)
            try:
                yield _entry(parse_json(line), is_head=first and number == 1), seen_bytes
            except ValueError as error:
                where = f"line {number}" if first else f"the line before byte {seen_bytes}"
                raise BadInput(f"{path}: damaged: {where}: {error}; begin anew in another --output") from error


def _entry(values: dict[str, object], *, is_head: bool) -> Entry:
    kinds = {"uploaded": Uploaded, "cut": TailCut}
    kind: Any = LogHead if is_head else next((kinds[key] for key in kinds if key in values), Result)
    entry: Entry = structured(values, kind)
    match entry:
        case Result(parts=found) if not found.keys() <= set(SPLITS):
            raise ValueError(f"parts: got {', '.join(found)}, wanted {', '.join(SPLITS)}")
        case TailCut(cut=found) if found.keys() != set(SPLITS):
            raise ValueError(f"cut: got {', '.join(found)}, wanted {', '.join(SPLITS)}")
    return entry
