"""A mean over tokens is a ratio of two sums over documents: its standard error, and that of a difference of two.

Documents are the units that were drawn: tokens of one document are alike (Cochran, Sampling Techniques, 3rd ed. 1977,
section 2.11). Sums by groups of consecutive documents are kept of each result, so that two models can be compared on
the same text later, without it: what makes a group hard for both of them leaves their difference.
"""

import math

import attrs
import numpy as np

GROUPS = 256  # at most, in a result


@attrs.frozen(kw_only=True)
class Groups:
    """Sums over groups of consecutive whole documents, whose boundaries are the same for every model."""

    nats: list[float]
    tokens: list[int]
    text_bytes: list[int]


def in_groups(nats: np.ndarray, tokens: np.ndarray, text_bytes: np.ndarray) -> Groups:
    """Return sums of what documents have, each (documents,); the groups have the same number of documents, or one less.

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


def ratio(values: np.ndarray, sizes: np.ndarray) -> tuple[float, float | None]:
    """Return the sum of values over the sum of sizes, and its standard error where there are two or more.

    Of two models, with the differences of their values, that is the difference of their ratios and its paired error.
    """
    total = float(sizes.sum())
    mean = float(values.sum()) / total
    number = len(values)
    if number < 2:
        return mean, None
    squares = float(np.square(values - mean * sizes).sum())
    return mean, math.sqrt(squares * number / (number - 1)) / total
