"""Significance of differences between recipes, over the noise of the text and of the training seed.

Without an estimate of the seed noise no winner is named: two runs that differ only in `random_seed` differ by more than
the interval over the text. All pairs of a measure are tested together at 5 %, by Holm's procedure with Shaffer's
refinement for pairs ("Modified Sequentially Rejective Multiple Test Procedures", Journal of the American Statistical
Association 81, 1986).
"""

from itertools import combinations
from math import comb

import attrs

from evaluation.comparison.rows import Row
from evaluation.comparison.seed_noise import Group, SeedNoise, group_by_recipe, pooled_noise, widened
from evaluation.shared.measure import EvaluationResult, Measure
from evaluation.shared.significance import CONFIDENCE, Interval

NO_WINNER = "no winner: the seed noise is unknown"


@attrs.frozen(kw_only=True)
class Pair:
    """Two recipes, and the difference between them with the noise of the text and, where known, of seeds."""

    measure: Measure
    groups: tuple[Group, Group]
    noise: SeedNoise | None

    @property
    def ranks_models(self) -> bool:
        """True if intervals cover all sources of chance, fine-tuning included."""
        return self.groups[0].results[0].ranks_models

    def difference(self, confidence: float) -> Interval | None:
        """Return the first less the second; None where there is no paired data."""
        assert self.measure.difference is not None
        one, other = ([found.sample for found in group.measurements(self.measure)] for group in self.groups)
        found = self.measure.difference(one, other, confidence)
        if found is None or self.noise is None:
            return found
        return widened(found, self.noise, (len(one), len(other)), confidence)


def find_winners(
    measure: Measure, rows: list[Row], results: list[EvaluationResult | None], stated_deviation: float | None
) -> tuple[list[str], list[str]]:
    """Return statements about a measure, and notes on its seed noise. `results`: the result shown for each row."""
    statements, notes = [], []
    for groups in group_by_recipe(rows, results):
        noise, note = pooled_noise(measure, groups)
        notes += [] if note is None else [note]
        if stated_deviation is not None:
            noise = SeedNoise(deviation=stated_deviation, freedom=float("inf"))
        if measure.difference is None:
            continue
        pairs = [Pair(measure=measure, groups=pair, noise=noise) for pair in combinations(groups, 2)]
        found = [verdict(pair, interval) for pair, interval in differences_together(pairs)]
        seeds = [group.name for group in groups if len(group.labels) > 1]
        found += [f"{name} are runs of one recipe: their difference is noise" for name in seeds]
        statements += [f"{measure.name}: {line}" for line in found]
    return statements, notes


def differences_together(pairs: list[Pair]) -> list[tuple[Pair, Interval]]:
    """Return the pairs of known difference with intervals whose family-wise error rate is 5 %.

    In rounds: pairs that were found to differ need no share of the 5 % in the next. The intervals of the last round are
    returned: zero lies outside where a pair differs significantly.
    """
    found = [(pair, interval) for pair in pairs if (interval := pair.difference(CONFIDENCE)) is not None]
    groups = len({id(group) for pair, _ in found for group in pair.groups})
    left = len(found)
    while True:
        confidence = 1 - (1 - CONFIDENCE) / max(1, _equal_at_most(groups, left))
        found = [(pair, interval) for pair, _ in found if (interval := pair.difference(confidence)) is not None]
        still = sum(not interval.apart for _, interval in found)
        if left in (0, still):
            return found
        left = still


def verdict(pair: Pair, found: Interval) -> str:
    """Return the statement about a pair: one is better only where the interval covers seed noise and excludes zero."""
    measure, (one, other) = pair.measure, pair.groups
    shown = found if found.value > 0 or not found.apart or not pair.ranks_models else -found
    size = f"{shown.text(measure.digits)} {measure.unit}"
    if found.low is None:
        return f"{one.name} and {other.name}: cannot tell, for too little was measured to test the difference: {size}"
    if not pair.ranks_models:
        return f"{one.name} and {other.name} cannot be ranked with one fine-tuning each: {size}"
    if not found.apart:
        return f"{one.name} and {other.name} do not differ significantly: {size}"
    if pair.noise is None:
        side = "above" if found.value > 0 else "below"
        return f"{one.name} {one.verb} {side} {other.name} by {size}; {NO_WINNER}"
    if (found.value > 0) != measure.higher_is_better:
        one, other = other, one
    return f"{one.name} {one.verb} better than {other.name} by {size}"


def _equal_at_most(groups: int, left: int) -> int:
    """Return how many of `left` pairs can be equal at once: a third group equals at most one of two that differ."""
    counts = {0: {0}}  # by number of groups: pairs that are equal, for each partition into equal groups
    for number in range(1, groups + 1):
        counts[number] = {comb(size, 2) + rest for size in range(1, number + 1) for rest in counts[number - size]}
    return max(count for count in counts[groups] if count <= left)
