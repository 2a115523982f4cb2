"""Problems with documents: counted by kind, the first of each kind kept in full."""

from collections import Counter
from typing import Any

import attrs

EXAMPLES = 100  # kept in full, of each kind of problem in a unit
DETAIL_CHARACTERS = 300


@attrs.frozen
class Problem:
    """Input that was left out, or changed."""

    kind: str  # one or two words, to count by
    where: str  # file and line, row or byte
    detail: str
    documents: int  # that are lost
    lost_bytes: int  # of input, where documents cannot be counted


class Problems:
    """The problems of a unit: there may be millions, from a few megabytes of compressed lines."""

    def __init__(self) -> None:
        self.first: list[Problem] = []  # at most EXAMPLES of each kind that lose something, and of those that do not
        self.lost_documents = 0
        self.lost_bytes = 0
        self._kept: Counter[tuple[str, bool]] = Counter()
        self._counts: Counter[tuple[str, bool]] = Counter()

    def add(self, kind: str, where: str, detail: str, documents: int = 1, lost_bytes: int = 0) -> None:
        """Count a problem; keep it if it is one of the first of its kind."""
        key = (kind, documents + lost_bytes > 0)
        self.lost_documents += documents
        self.lost_bytes += lost_bytes
        self._counts[key] += max(1, documents)
        self._kept[key] += 1
        if self._kept[key] <= EXAMPLES:
            first_line = (detail.splitlines() or [""])[0]
            self.first.append(Problem(kind, where, first_line[:DETAIL_CHARACTERS], documents, lost_bytes))

    def summary(self) -> dict[str, Any]:
        """Return the fields of a `Result` (tokens/prepare/encode_unit.py); kinds that lost something come first."""
        counts: Counter[str] = Counter()
        for (kind, _), count in sorted(self._counts.items(), key=lambda item: not item[0][1]):
            counts[kind] += count
        examples: dict[str, list[str]] = {}
        for problem in sorted(self.first, key=lambda problem: problem.documents + problem.lost_bytes == 0):
            lines = examples.setdefault(problem.kind, [])
            if len(lines) < EXAMPLES:
                lines.append(f"{problem.where}: {problem.kind}: {problem.detail}")
        return {
            "problems": dict(counts),
            "lost_documents": self.lost_documents,
            "lost_bytes": self.lost_bytes,
            "examples": examples,
        }
