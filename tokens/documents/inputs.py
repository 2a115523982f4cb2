"""Input files of documents, local or remote, and the problems in them.

The files must not change after the plan has been made.
"""

from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from common.errors import BadInput, refusing
from common.redaction import redacted_name
from common.remote_files import REMOTE, RemoteFile, look_up_remote

TEXT_SUFFIXES = (".txt", ".md", ".py")  # each file is a document
LINE_SUFFIXES = (".jsonl", ".json")  # each line is a document
COMPRESSED_SUFFIXES = tuple(f"{lines}{packed}" for lines in LINE_SUFFIXES for packed in (".gz", ".zst"))
RECORD_SUFFIXES = (*LINE_SUFFIXES, *COMPRESSED_SUFFIXES, ".parquet")  # each record is a document
SUFFIXES = (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
# Maximum number of examples of each kind of problem in a unit. A few compressed megabytes may have millions of
# problems.
EXAMPLES = 100
PROBLEM_CHARACTERS = 300


class Damaged(Exception):
    """A file violates its format; the message says how."""


@attrs.frozen
class Input:
    """One file of documents, as it was when the plan was made."""

    path: str  # path or URL
    size_bytes: int
    stamp: str  # changes when the content does: the modification time, or the server's tag

    def open(self) -> BinaryIO:
        """Open the file for reading. Raises BadInput if it is missing, has changed or cannot be read."""
        if REMOTE in self.path:
            file = look_up_remote(self.path)  # every later read checks that the file still has the same tag
            self.compare(remote_input(file))
            return file.open()
        self.check()
        with readable(self.path):
            return Path(self.path).open("rb")

    def check(self) -> None:
        """Raise BadInput if the file has changed since the plan was made."""
        self.compare(look_up(self.path))

    def compare(self, now: "Input") -> None:
        if now != self:
            raise BadInput(
                f"{self.path}: has changed since this preparation started; restore it, or pass another --output"
            )


@attrs.frozen
class Extent:
    """The part of an input from `begin` up to, but not including, `end`.

    Both are positions in bytes or, for a Parquet file, indices of row groups. A compressed file is never divided.
    """

    input: int  # index of the input
    begin: int
    end: int


class Problems:
    """Counts and examples of problems. A problem is input that was left out or changed."""

    def __init__(self) -> None:
        self.lost_documents = 0
        self.lost_bytes = 0
        self._counts: Counter[str] = Counter()  # number of problems of each kind
        self._examples: dict[str, list[str]] = {}
        self._losses: set[str] = set()  # kinds of problems that caused a loss

    def add(self, kind: str, where: str, detail: str, documents: int = 1, lost_bytes: int = 0) -> None:
        """Count a problem of a `kind` at `where`.

        `documents` is the number of lost documents. If they cannot be counted, `lost_bytes` is the size of the lost
        input.
        """
        self.lost_documents += documents
        self.lost_bytes += lost_bytes
        self._losses |= {kind} if documents + lost_bytes else set()
        self._counts[kind] += max(1, documents)
        examples = self._examples.setdefault(kind, [])
        if len(examples) < EXAMPLES:
            first_line = (detail.splitlines() or [""])[0]
            examples.append(f"{redacted_name(where)}: {kind}: {first_line[:PROBLEM_CHARACTERS]}")

    def count(self, kind: str, times: int = 1) -> None:
        """Count a problem that causes no loss and needs no example, because its kind describes it completely."""
        self._counts[kind] += times

    def summary(self) -> dict[str, Any]:
        """Return the fields of a `Result` (tokens/prepare/encode_unit.py) that describe problems.

        Kinds of problems that caused a loss come first.
        """
        kinds = sorted(self._counts, key=lambda kind: kind not in self._losses)
        losses = {"lost_documents": self.lost_documents, "lost_bytes": self.lost_bytes}
        problems = {kind: self._counts[kind] for kind in kinds}
        examples = {kind: self._examples[kind] for kind in kinds if kind in self._examples}
        return {"problems": problems, **losses, "examples": examples}


def look_up(path: str) -> Input:
    """Return the `Input` of a file as it is now. Raises BadInput if the file does not exist."""
    if REMOTE in path:
        return remote_input(look_up_remote(path))
    with readable(path):
        status = Path(path).stat()
    return Input(path, status.st_size, f"mtime {status.st_mtime_ns}")


def remote_input(file: RemoteFile) -> Input:
    return Input(file.url, file.size_bytes, file.stamp)


def readable(path: str) -> AbstractContextManager[None]:
    """Raise BadInput instead of an OSError in the `with` block, which reads `path`."""
    return refusing(f"{path}: cannot be read", "restore it, then rerun the same command", (OSError,))
