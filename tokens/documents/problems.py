"""Problems with the documents of a unit: counted by kind, the first of each kind kept in full."""

from collections import Counter
from typing import Any

EXAMPLES = 100  # of each kind in a unit: there may be millions, from a few megabytes of compressed lines
DETAIL_CHARACTERS = 300


class Problems:
    """Input that was left out, or changed."""

    def __init__(self) -> None:
        self.lost_documents = 0
        self.lost_bytes = 0
        self._counts: Counter[tuple[bool, str]] = Counter()  # by whether nothing is lost, and kind
        self._examples: dict[tuple[bool, str], list[str]] = {}

    def add(self, kind: str, where: str, detail: str, documents: int = 1, lost_bytes: int = 0) -> None:
        """Count a problem.

        `kind`: one or two words; `where`: file and line, row or byte; `documents`: that are lost; `lost_bytes`: of
        input, where documents cannot be counted.
        """
        key = (documents + lost_bytes == 0, kind)
        self.lost_documents += documents
        self.lost_bytes += lost_bytes
        self._counts[key] += max(1, documents)
        examples = self._examples.setdefault(key, [])
        if len(examples) < EXAMPLES:
            first_line = (detail.splitlines() or [""])[0]
            examples.append(f"{where}: {kind}: {first_line[:DETAIL_CHARACTERS]}")

    def summary(self) -> dict[str, Any]:
        """Return the fields of a `Result` (tokens/prepare/encode_unit.py); kinds that lost something come first."""
        problems: Counter[str] = Counter()
        examples: dict[str, list[str]] = {}
        for key in sorted(self._counts, key=lambda key: key[0]):
            problems[key[1]] += self._counts[key]
            examples[key[1]] = (examples.get(key[1], []) + self._examples[key])[:EXAMPLES]
        lost = {"lost_documents": self.lost_documents, "lost_bytes": self.lost_bytes}
        return {"problems": dict(problems), **lost, "examples": examples}
