"""Shared parts of the benchmarks that check stated error rates: seeds, limits, and the text of a cell.

A cell of a grid has FAMILIES repetitions. The data of a cell come from a generator that is seeded with the grid's name
and the cell's number. They do not depend on the tested program. The seeds were fixed before the first run.
"""

import numpy as np
from scipy import signal

FAMILIES = 2400
# The largest accepted number of false differences in FAMILIES repetitions. At this number, the one-sided 95% bound of
# the error rate is 7%.
MOST_FALSE = 147
LEAST_COVERED, TOO_WIDE = 0.85, 0.99  # smallest and largest accepted coverage of 95% intervals


def generator(grid: str, cell: int) -> np.random.Generator:
    """Return the generator of one cell."""
    return np.random.default_rng([50, cell, *grid.encode()])


def percent(share: float) -> str:
    return f"{share:.1%}"


def false_text(false: int, families: int) -> str:
    """Return the number of families with a false difference, with a mark if there are too many."""
    return f"{false:,}{' MANY' if false > MOST_FALSE * families / FAMILIES else ''}"


def holds(low: float | None, high: float | None, truth: float) -> bool:
    """Return whether both bounds exist and contain the truth."""
    return low is not None and high is not None and low - 1e-12 <= truth <= high + 1e-12


def covered_text(inside: int, intervals: int) -> str:
    """Return the share of intervals that contain the truth, with a mark if it is too low or too high."""
    if not intervals:
        return "none given"
    share = inside / intervals
    return percent(share) + (" LOW" if share < LEAST_COVERED else " wide" if share > TOO_WIDE else "")


def series(random: np.random.Generator, shape: tuple[int, ...], correlation: float) -> np.ndarray:
    """Return stationary, normal AR(1) series along the last axis, with standard deviation 1.

    `correlation` is the correlation of neighboring values.
    """
    innovations = np.sqrt(1 - correlation**2) * random.standard_normal(shape)
    innovations[..., 0] = random.standard_normal(shape[:-1])
    return np.asarray(signal.lfilter([1.0], [1.0, -correlation], innovations, axis=-1))
