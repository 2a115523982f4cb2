"""Shared parts of the benchmarks of stated error rates: seeds, limits, and the text of a cell.

A cell of a grid has FAMILIES repeats. Its data come from a generator that is seeded by the grid's name and by the
cell's number, never by the program that is tested. The seeds were fixed before the first run.
"""

import numpy as np
from scipy import signal

FAMILIES = 2400
MOST_FALSE = 147  # of FAMILIES, where nothing differs: the one-sided 95 % bound of the rate is then 7 %
LEAST_COVERED, TOO_WIDE = 0.85, 0.99  # of 95 % intervals


def generator(grid: str, cell: int) -> np.random.Generator:
    """Return the generator of one cell."""
    return np.random.default_rng([50, cell, *grid.encode()])


def percent(share: float) -> str:
    return f"{share:.1%}"


def false_text(false: int, families: int) -> str:
    """Return how many families name a difference that does not exist, with a mark if there are too many."""
    return f"{false:,}{' MANY' if false > MOST_FALSE * families / FAMILIES else ''}"


def holds(low: float | None, high: float | None, truth: float) -> bool:
    """Tell whether bounds are given, and hold the truth."""
    return low is not None and high is not None and low - 1e-12 <= truth <= high + 1e-12


def covered_text(inside: int, given: int) -> str:
    """Return the share of the given intervals that hold the truth, with a mark if it is too low or too high."""
    if not given:
        return "none given"
    share = inside / given
    return percent(share) + (" LOW" if share < LEAST_COVERED else " wide" if share > TOO_WIDE else "")


def series(random: np.random.Generator, shape: tuple[int, ...], correlation: float) -> np.ndarray:
    """Return stationary normal series of deviation 1 along the last axis, in which neighbours correlate: AR(1)."""
    fresh = np.sqrt(1 - correlation**2) * random.standard_normal(shape)
    fresh[..., 0] = random.standard_normal(shape[:-1])
    return np.asarray(signal.lfilter([1.0], [1.0, -correlation], fresh, axis=-1))
