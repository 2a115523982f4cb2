"""Data mixture: the source of each sample of a run, computed with integer arithmetic and without state.

The weights of a stage become shares, which are whole numbers without a common divisor. Their sum D is the length of
the stage's table. Sample n of the stage comes from the source in entry n mod D. The entries are arranged so that, after
any number of samples, the count of each source is less than one sample away from the count that its weight requires.
The position of a sample among the samples of its source is computed from n div D, n mod D and a number that is stored
with the entry.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import attrs
import numpy as np

MOST_ENTRIES = 1 << 20  # maximum length of a table; a table of this length takes 8 MiB and a second to compute


@attrs.frozen
class Stage:
    """A part of a run in which the mixture weights are constant."""

    first: int  # first sample of the stage, counted from the beginning of the run
    shares: tuple[int, ...]  # number of samples from each source in every D = sum(shares) samples


class Mixture:
    """The source of every sample, and the sample's position among all samples of that source."""

    def __init__(self, stages: Sequence[Stage]):
        assert stages[0].first == 0, stages[0].first
        self._firsts = np.array([stage.first for stage in stages])
        self._tables = [_Table(stage.shares) for stage in stages]
        self._before = [np.zeros(len(stages[0].shares), np.int64)]  # samples of each source before each stage
        for stage, following, table in zip(stages, stages[1:], self._tables, strict=False):
            self._before.append(self._before[-1] + table.counts(following.first - stage.first))

    def find(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each sample's source, and its position 0, 1, 2 ... among the samples of that source."""
        sources, positions = np.empty_like(samples), np.empty_like(samples)
        numbers = np.searchsorted(self._firsts, samples, side="right") - 1
        for number, table in enumerate(self._tables):
            in_stage = numbers == number
            stage_sources, positions_in_stage = table.find(samples[in_stage] - self._firsts[number])
            sources[in_stage] = stage_sources
            positions[in_stage] = self._before[number][stage_sources] + positions_in_stage
        return sources, positions

    def counts(self, samples: int) -> list[int]:
        """Return how many of a run's first `samples` samples come from each source."""
        number = int(np.searchsorted(self._firsts, samples, side="right")) - 1
        return (self._before[number] + self._tables[number].counts(samples - int(self._firsts[number]))).tolist()


class _Table:
    """The sources of a stage's samples. They repeat after `sum(shares)` samples, and this is one period."""

    def __init__(self, shares: tuple[int, ...]):
        self._shares = np.array(shares)
        self._size = sum(shares)
        self._sources = np.array(assign(shares), np.int32)
        self._ranks = np.empty(self._size, np.int32)
        for source, share in enumerate(shares):
            self._ranks[self._sources == source] = np.arange(share)

    def find(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        turns, entries = np.divmod(samples, self._size)
        sources = self._sources[entries]
        return sources, turns * self._shares[sources] + self._ranks[entries]

    def counts(self, samples: int) -> np.ndarray:
        turns, entry = divmod(samples, self._size)
        return turns * self._shares + np.bincount(self._sources[:entry], minlength=len(self._shares))


def to_shares(weights: Sequence[int | float]) -> tuple[int, ...]:
    """Return the smallest integers in the same proportion as the weights; a weight of 0.1 means exactly one tenth.

    Raises ValueError if the sum of these integers is too large.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * denominator) for weight in exact]
    divisor = math.gcd(*integers)
    shares = tuple(weight // divisor for weight in integers)
    if sum(shares) > MOST_ENTRIES:
        got = ", ".join(map(str, weights))
        expected = f"weights in proportion to whole numbers with a sum of at most {MOST_ENTRIES:,}"
        raise ValueError(f"got weights {got}, wanted {expected}; round the weights to fewer digits")
    return shares


def assign(shares: Sequence[int]) -> list[int]:
    """Return the source of each of sum(shares) samples, so that every prefix contains almost exactly the given shares.

    R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): with k sources, the counts in a prefix
    are off by at most 1 - 1 / (2k - 2) samples. Sample n, counted from 1, may go to a source of weight w that has
    received j samples if n w - j >= 1 / (2k - 2). Among these sources it goes to the one with the least
    (1 - 1 / (2k - 2) - (n w - j)) / w. For every n, that is the source with the least (j + 1 - 1 / (2k - 2)) / w. This
    quantity is therefore the due date of the source's next sample.
    """
    size, sources = sum(shares), [source for source, share in enumerate(shares) if share > 0]
    if len(sources) == 1:
        return sources * size
    unit = 2 * len(sources) - 2

    def next_sample(source: int, count: int) -> tuple[int, int, int]:
        """Return the earliest position of a source's next sample, its due date, and the source, which breaks ties."""
        earliest = -(-(unit * count + 1) * size // (unit * shares[source]))
        # Due dates are fractions with denominators up to 2^20, so 40 more bits separate any two different due dates.
        due_date = (unit * (count + 1) - 1 << 40) // shares[source]
        return earliest, due_date, source

    counts, following = [0] * len(shares), [next_sample(source, 0) for source in sources]
    chosen = []
    for sample in range(1, size + 1):
        ready = [
            (due_date, source, index)
            for index, (earliest, due_date, source) in enumerate(following)
            if earliest <= sample
        ]
        _, source, index = min(ready)
        counts[source] += 1
        following[index] = next_sample(source, counts[source])
        chosen.append(source)
    return chosen
