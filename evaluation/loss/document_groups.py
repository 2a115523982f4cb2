"""Losses summed over groups of consecutive documents, stored with a result for later paired comparison.

Two models measured on the same text can be compared without the text: document difficulty common to both cancels in
the difference of their groups.
"""

import attrs
import numpy as np

GROUPS = 256  # in one result, at most


@attrs.frozen(kw_only=True)
class Groups:
    """Sums over groups of consecutive whole documents, whose boundaries are the same for every model."""

    nats: list[float]
    tokens: list[int]
    text_bytes: list[int]


def in_groups(nats: np.ndarray, tokens: np.ndarray, text_bytes: np.ndarray) -> Groups:
    """Return sums of per-document values, each (documents,), over groups of equally many documents, or one less.

    Nats are rounded to a millionth.
    """
    documents = len(nats)
    count = min(documents, GROUPS)
    begins = np.arange(count) * documents // count
    return Groups(
        nats=[round(float(value), 6) for value in np.add.reduceat(nats, begins)],
        tokens=[int(value) for value in np.add.reduceat(tokens, begins)],
        text_bytes=[int(value) for value in np.add.reduceat(text_bytes, begins)],
    )
