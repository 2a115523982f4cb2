"""Which split a document belongs to.

By a hash of its text: whatever is added or reordered, a document stays where it is, and copies of it stay together.
Or all to the train stream, whose tail is cut off at the end, as the first token sets were made.
"""

from collections.abc import Iterable

import attrs
import numpy as np

SPLITS = ("train", "validation", "test")
HASH, TAIL = "hash", "tail"


@attrs.frozen(kw_only=True)
class SplitRule:
    """How documents are held out."""

    kind: str  # HASH or TAIL
    seed: int
    validation: float  # share of the documents
    test: float

    def of(self, heads: Iterable[str]) -> np.ndarray | None:
        """Return the number in SPLITS for each document, told by its first characters; None: all in the first."""
        if self.kind == TAIL or self.validation + self.test == 0:
            return None
        import xxhash

        hashes = np.array([xxhash.xxh3_64_intdigest(head.encode(), self.seed) for head in heads], np.uint64)
        places = hashes / 2.0**64  # in 0 .. 1
        # The shares lie side by side from 0 on: a larger test share takes nothing from validation.
        held_out = np.where(places < self.validation, 1, 2)
        return np.where(places < self.validation + self.test, held_out, 0)
