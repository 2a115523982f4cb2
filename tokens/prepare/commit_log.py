"""`ledger.jsonl`: which units are in the token files, one line each, in the order of the plan.

A line is written when the unit's tokens are on the disk. Whatever a kill leaves behind after the last complete line,
in the ledger or in the token files, is cut off at the next start.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, quoted
from common.files import sync
from common.json_files import open_regular, parse_json
from tokens.format.splits import SPLITS
from tokens.format.token_file import readable_tokens
from tokens.prepare.encode_unit import Result, UnitPart

LEDGER = "ledger.jsonl"
SHOWN = 5  # examples of each kind of problem in the totals
FORMAT = 1


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
            told = self.examples.setdefault(kind, [])
            told += lines[: SHOWN - len(told)]


class CommitLog:
    """The ledger of a token directory, open for appending."""

    def __init__(self, directory: Path, plan_fingerprint: str):
        """Continue a ledger, or begin one. Raises BadInput for that of another plan, and for a damaged one."""
        self.path = directory / LEDGER
        self.totals = Totals()
        self.cut: dict[str, int] | None = None  # tokens of each split after the tail was cut off
        self.uploaded: dict[str, dict[str, Any]] = {}  # what the shards in a bucket hold, by name
        known_bytes = 0
        if self.path.exists():
            head, known_bytes = _read_head(self.path)
            if head is not None and head != {"format": FORMAT, "plan": plan_fingerprint}:
                raise BadInput(f"{self.path}: belongs to another plan; pass another --output")
            for entry, end in _entries(self.path, known_bytes):
                self._take(entry)
                known_bytes = end
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        self._file.truncate(known_bytes)
        self._file.seek(known_bytes)
        if known_bytes == 0:
            self._append({"format": FORMAT, "plan": plan_fingerprint})
            sync(directory)

    def append(self, results: list[Result]) -> None:
        """Note that units are committed; on the disk when it returns."""
        for result in results:
            self._file.write(json.dumps(attrs.asdict(result)).encode() + b"\n")
            self.totals.add(result)
        self._sync()

    def append_cut(self, cut: dict[str, int]) -> None:
        """Note how many tokens each split has, now that the others' are copied out of the train stream."""
        self._append({"cut": cut})
        self.cut = cut

    def append_uploaded(self, name: str, content: dict[str, Any]) -> None:
        """Note what a shard holds that is in the bucket."""
        self._append({"uploaded": name, "content": content})
        self.uploaded[name] = content

    def close(self) -> None:
        self._file.close()

    def _take(self, entry: dict[str, Any]) -> None:
        if "cut" in entry:
            self.cut = entry["cut"]
        elif "uploaded" in entry:
            self.uploaded[entry["uploaded"]] = entry["content"]
        else:
            self.totals.add(_result(entry))

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def read_ledger(directory: Path) -> tuple[Totals, dict[str, int] | None]:
    """Return the totals of a ledger, which somebody may be writing, and the cut of the tail, if there is one."""
    totals, cut = Totals(), None
    for entry in ledger_entries(directory):
        if "cut" in entry:
            cut = entry["cut"]
        elif "uploaded" not in entry:
            totals.add(_result(entry))
    return totals, cut


def read_results(directory: Path) -> Iterator[Result]:
    """Yield the committed units, in order."""
    return (_result(entry) for entry in ledger_entries(directory) if "index" in entry)


def ledger_entries(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a ledger but the first."""
    return (entry for entry, _ in entries_after(directory / LEDGER, 0))


def entries_after(path: Path, seen_bytes: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the complete lines of a ledger after its first `seen_bytes`, but for the head, and where each ends."""
    begin = seen_bytes or (_read_head(path)[1] if path.exists() or path.is_symlink() else 0)
    if begin:  # else the head is still being written
        yield from _entries(path, begin)


def _read_head(path: Path) -> tuple[dict[str, Any] | None, int]:
    with readable_tokens(path), open_regular(path) as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        return None, 0
    try:
        return parse_json(line), len(line)
    except ValueError as error:
        raise BadInput(f"{path}: damaged: line 1: {error}; begin anew in another --output") from error


def _entries(path: Path, begin: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the complete lines from a position on, and where each ends."""
    with path.open("rb") as file:
        file.seek(begin)
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                return  # a kill while it was written
            begin += len(line)
            try:
                entry = parse_json(line)
                _check(entry)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                what = error if isinstance(error, ValueError) else f"no unit: {quoted(error)}"
                raise BadInput(f"{path}: damaged: line {number}: {what}; begin anew in another --output") from error
            yield entry, begin


def _check(entry: dict[str, Any]) -> None:
    """Raise ValueError, KeyError, TypeError or AttributeError for what is no line of a ledger."""
    if "cut" in entry:
        if not all(type(entry["cut"][split]) is int for split in SPLITS):
            raise ValueError(f"cut: got {quoted(entry['cut'])}, wanted tokens of {', '.join(SPLITS)}")
    elif "uploaded" in entry:
        if not (isinstance(entry["uploaded"], str) and isinstance(entry["content"], dict)):
            raise ValueError(f"uploaded: got {quoted(entry)}, wanted a name and its content")
    else:
        _result(entry)


def _result(entry: dict[str, Any]) -> Result:
    parts = {split: UnitPart(**part) for split, part in entry["parts"].items()}
    return Result(**entry | {"parts": parts})
