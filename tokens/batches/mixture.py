"""Data mixture: the source of each sample of a run, by integer arithmetic without state.

The weights of a stage become shares, whole numbers without a common divisor; their sum D is the length of its table.
Sample n of the stage comes from the source of entry n mod D, so no source is ever a whole sample ahead of its weight or
behind it. A sample's place among those of its source takes a division, a remainder and a number stored with the entry.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import attrs
import numpy as np

MOST_ENTRIES = 1 << 20  # of a table: a second to make, 8 MiB


@attrs.frozen
class Stage:
    """Part of a run with constant mixture weights."""

    first: int  # its first sample, counted from the run's beginning
    shares: tuple[int, ...]  # of each source: samples in each D = sum(shares)


class Mixture:
    """The source of every sample, and the sample's place among those of its source."""

    def __init__(self, stages: Sequence[Stage]):
        assert stages[0].first == 0, stages[0].first
        self._firsts = np.array([stage.first for stage in stages])
        self._tables = [_Table(stage.shares) for stage in stages]
        self._before = [np.zeros(len(stages[0].shares), np.int64)]  # samples of each source before a stage
        for stage, following, table in zip(stages, stages[1:], self._tables, strict=False):
            self._before.append(self._before[-1] + table.counts(following.first - stage.first))

    def find(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each sample's source, and its place among that source's samples, 0, 1, 2 and so on."""
        sources, places = np.empty_like(samples), np.empty_like(samples)
        numbers = np.searchsorted(self._firsts, samples, side="right") - 1
        for number, table in enumerate(self._tables):
            here = numbers == number
            found, rank = table.find(samples[here] - self._firsts[number])
            sources[here], places[here] = found, self._before[number][found] + rank
        return sources, places

    def counts(self, samples: int) -> list[int]:
        """Return the number of samples from each source among a run's first `samples`."""
        number = int(np.searchsorted(self._firsts, samples, side="right")) - 1
        return (self._before[number] + self._tables[number].counts(samples - int(self._firsts[number]))).tolist()


class _Table:
    """One period of a stage's sources."""

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
    """Return weights as the smallest integers in proportion; 0.1 is a tenth. Raises ValueError for too large a sum."""
    exact = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * denominator) for weight in exact]
    divisor = math.gcd(*whole)
    shares = tuple(weight // divisor for weight in whole)
    if sum(shares) > MOST_ENTRIES:
        got = ", ".join(map(str, weights))
        wanted = f"whole numbers in proportion, {MOST_ENTRIES:,} in all at most"
        raise ValueError(f"got weights {got}, wanted {wanted}; round the weights to fewer digits")
    return shares


def assign(shares: Sequence[int]) -> list[int]:
    """Return the source of each of sum(shares) samples, so that every prefix has nearly each source's share.

    R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): with k sources a prefix is off by at
    most 1 - 1 / (2k - 2) samples. Sample n, counted from 1, may go to a source of weight w that has had j samples as
    soon as n w - j >= 1 / (2k - 2), and goes to the one of these whose (1 - 1 / (2k - 2) - (n w - j)) / w is least.
    That is the one with the least (j + 1 - 1 / (2k - 2)) / w, whatever n: a date by which its next sample is due.
    """
    size, sources = sum(shares), [source for source, share in enumerate(shares) if share > 0]
    if len(sources) == 1:
        return sources * size
    unit = 2 * len(sources) - 2

    def dates(source: int, had: int) -> tuple[int, int, int]:
        """Return the first sample that may be its next, its due date, and the source, which decides between equals."""
        may_come = -(-(unit * had + 1) * size // (unit * shares[source]))
        # Due dates are fractions with denominators up to 2^20: 40 more bits tell any two of them apart.
        due = (unit * (had + 1) - 1 << 40) // shares[source]
        return may_come, due, source

    counts, following = [0] * len(shares), [dates(source, 0) for source in sources]
    chosen = []
    for sample in range(1, size + 1):
        ready = [(due, source, place) for place, (may_come, due, source) in enumerate(following) if may_come <= sample]
        _, source, place = min(ready)
        counts[source] += 1
        following[place] = dates(source, counts[source])
        chosen.append(source)
    return chosen
