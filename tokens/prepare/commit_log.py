"""Commit log `ledger.jsonl`: a line for each unit, in the order of the plan.

The line is written when the tokens of the unit are on the disk.

Anything after the last complete line of the log, or after the tokens of that line's unit, was left by a killed process.
The next start cuts these remains off.
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
SHOWN = 5  # for each kind of problem, the totals keep at most this number of examples
FORMAT = 1


def reached(point: str) -> None:
    """Do nothing. This marks a point of the protocol at which tests kill the process."""


@attrs.frozen
class LogHead:
    """The first line of the log: its format, and the fingerprint of the plan."""

    format: int
    plan: str


@attrs.frozen
class TailCut:
    """An entry that says: the tail of the train stream has been copied to the held-out splits."""

    cut: dict[str, int]  # final number of tokens of each split


@attrs.frozen
class Uploaded:
    """An entry that says: a full shard is in the bucket."""

    uploaded: str  # name of the shard in the bucket
    content: Content


Entry = LogHead | Result | TailCut | Uploaded


@attrs.define(kw_only=True)
class Totals:
    """Sums over the entries of a commit log."""

    units: int = 0
    tokens: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(SPLITS, 0))
    documents: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(SPLITS, 0))
    empty_documents: int = 0  # documents without text, which are included in `documents`
    counted: int = 0  # number of tokens that count in the loss; 0 for plain text
    padding: int = 0  # tokens after the last conversation of a row
    text_bytes: int = 0
    problems: Counter[str] = attrs.field(factory=Counter)
    lost_documents: int = 0
    lost_bytes: int = 0
    examples: dict[str, list[str]] = attrs.field(factory=dict)  # the first examples of problems, by kind
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
                    examples = self.examples.setdefault(kind, [])
                    examples += lines[: SHOWN - len(examples)]


class CommitLog:
    """The commit log of a token directory, open for appending."""

    def __init__(self, directory: Path, plan_fingerprint: str):
        """Continue a log, or start a new log. Raises BadInput if the log is damaged or belongs to another plan."""
        self.path = directory / COMMITS
        self.totals = Totals()
        head, complete_bytes = LogHead(FORMAT, plan_fingerprint), 0
        for entry, end in entries_after(self.path, 0):
            complete_bytes = end
            if isinstance(entry, LogHead) and entry != head:
                raise BadInput(f"{self.path}: belongs to another plan; pass another --output")
            self.totals.add(entry)
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        with naming(self.path):
            self._file.truncate(complete_bytes)
        self._file.seek(complete_bytes)
        if complete_bytes == 0:
            self.append(head)
            sync(directory)

    def append(self, *entries: Entry) -> None:
        """Append entries, and return when they are on the disk."""
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
    """Yield the complete entries of a log after its first `seen_bytes`, each with the position of its end in bytes."""
    if not path.exists() and not path.is_symlink():
        return
    with readable_tokens(path), open_regular(path) as file:
        first = file.seek(seen_bytes) == 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # the process was killed while it wrote this line
            seen_bytes += len(line)
            try:
                yield _entry(parse_json(line), is_head=first and number == 1), seen_bytes
            except ValueError as error:
                where = f"line {number}" if first else f"the line before byte {seen_bytes}"
                raise BadInput(f"{path}: damaged: {where}: {error}; start over in another --output") from error


def _entry(values: dict[str, object], *, is_head: bool) -> Entry:
    kinds = {"uploaded": Uploaded, "cut": TailCut}
    kind: Any = LogHead if is_head else next((kinds[key] for key in kinds if key in values), Result)
    entry: Entry = structured(values, kind)
    match entry:
        case Result(parts=parts) if not parts.keys() <= set(SPLITS):
            raise ValueError(f"parts: got {', '.join(parts)}, wanted {', '.join(SPLITS)}")
        case TailCut(cut=lengths) if lengths.keys() != set(SPLITS):
            raise ValueError(f"cut: got {', '.join(lengths)}, wanted {', '.join(SPLITS)}")
    return entry
