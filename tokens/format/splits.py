"""Train, validation and test: the split of a document.

By a hash of its text, so that a document stays in its split whatever is added or reordered, and copies share one. Or
all to train, whose last documents are held out at the end (tokens/prepare/tail_split.py).
"""

from collections.abc import Iterable

import attrs
import numpy as np

SPLITS = ("train", "validation", "test")
HASH, TAIL = "hash", "tail"


@attrs.frozen(kw_only=True)
class SplitRule:
    """Rule that holds out documents."""

    kind: str  # HASH or TAIL
    seed: int
    validation: float  # share of the documents
    test: float

    def of(self, heads: Iterable[str]) -> np.ndarray | None:
        """Return the index in SPLITS of each document, from its first characters; None: all are in train."""
        if self.kind == TAIL or self.validation + self.test == 0:
            return None
        import xxhash

        hashes = np.array([xxhash.xxh3_64_intdigest(head.encode(), self.seed) for head in heads], np.uint64)
        places = hashes / 2.0**64  # in 0 .. 1
        # The shares lie side by side from 0 on: a larger test share takes nothing from validation.
        held_out = np.where(places < self.validation, 1, 2)
        return np.where(places < self.validation + self.test, held_out, 0)
