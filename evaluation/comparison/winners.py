"""Significance of differences between recipes, over the noise of the text and of the training seed.

No winner is named where the seed noise is unknown, as it is larger than the interval over the text. All pairs of a
measure are tested together at 5 % by Holm's procedure (Scandinavian Journal of Statistics 6, 1979).
"""

from itertools import combinations

import attrs

from evaluation.comparison.rows import Row
from evaluation.shared.results import EvaluationResult, Measure
from evaluation.shared.significance import (
    ERROR,
    Interval,
    Runs,
    SeedNoise,
    residual_deviation,
    seed_noise,
    shared_seeds,
)

NAMED = 3  # models listed by name in a statement


@attrs.frozen(kw_only=True)
class Group:
    """Models of one recipe measured on the same data. A model of unknown recipe is a group of its own."""

    labels: list[str]  # of all models
    results: dict[int, EvaluationResult]  # by training seed; of an unknown one below zero

    @property
    def name(self) -> str:
        count, more = len(self.results), len(self.labels) - NAMED
        names = ", ".join(self.labels if more < 2 else [*self.labels[:NAMED], f"{more} more"])
        return names + (f" ({count} seeds)" if count > 1 else "")

    @property
    def verb(self) -> str:
        return "is" if len(self.labels) == 1 else "are"

    def values(self, measure: Measure) -> Runs:
        found = {seed: result.measurement(measure) for seed, result in self.results.items()}
        return {seed: one.value for seed, one in found.items() if one is not None}


@attrs.frozen
class Statement:
    """What a comparison says about two recipes, and what a reader has to know to understand it."""

    text: str
    has_bounds: bool = False  # it shows an interval
    needs_seeds: bool = False  # it names no winner, because the seed noise is unknown


@attrs.frozen(kw_only=True)
class Pair:
    """Two recipes, and the difference between them with the noise of the text and, where known, of seeds."""

    measure: Measure
    groups: tuple[Group, Group]
    noise: SeedNoise | None

    @property
    def ranks_models(self) -> bool:
        """True if intervals cover all sources of chance, fine-tuning included."""
        return all(result.ranks_models for result in self.groups[0].results.values())

    def difference(self, comparisons: int) -> Interval | None:
        """Return the first less the second, as one of several comparisons; None where there is no paired data."""
        assert self.measure.difference is not None
        values = [group.values(self.measure) for group in self.groups]
        seeds = shared_seeds(*values)
        one, other = (
            [each.sample for seed in seeds or runs if (each := group.results[seed].measurement(self.measure))]
            for group, runs in zip(self.groups, values, strict=True)
        )
        found = self.measure.difference(one, other, 1 - ERROR / comparisons)
        return found if found is None or self.noise is None else self.noise.added_to(found, comparisons)


def find_winners(
    measure: Measure, rows: list[Row], results: list[EvaluationResult | None], stated_deviation: float | None
) -> tuple[list[Statement], list[str]]:
    """Return statements about a measure, and notes on its seed noise. `results`: the result shown for each row."""
    statements, notes = list[Statement](), list[str]()
    for known in group_by_recipe(rows, results):
        groups = [group for group in known if group.values(measure)]
        notes += seed_note(measure, groups)
        if measure.difference is None:
            continue
        runs = [group.values(measure) for group in groups]
        pairs = [
            Pair(measure=measure, groups=(one, other), noise=seed_noise(runs, a, b, stated_deviation))
            for (one, a), (other, b) in combinations(zip(groups, runs, strict=True), 2)
        ]
        found = [verdict(pair, interval) for pair, interval in differences_together(pairs)]
        seeds = [group.name for group in groups if len(group.labels) > 1]
        found += [Statement(f"{name} are runs of one recipe: their difference is noise") for name in seeds]
        statements += [attrs.evolve(one, text=f"{measure.name}: {one.text}") for one in found]
    return statements, notes


def group_by_recipe(rows: list[Row], results: list[EvaluationResult | None]) -> list[list[Group]]:
    """Return the groups of each subject, in the order of the rows. `results`: the result shown for each row."""
    subjects: dict[str, dict[object, Group]] = {}
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        if result is not None:
            recipes = subjects.setdefault(result.subject, {})
            group = recipes.setdefault(index if row.recipe is None else row.recipe, Group(labels=[], results={}))
            group.labels.append(row.label)
            group.results.setdefault(-1 - index if row.seed is None else row.seed, result)
    return [list(recipes.values()) for recipes in subjects.values()]


def seed_note(measure: Measure, groups: list[Group]) -> list[str]:
    """Return a note on the spread of each recipe over its seeds; none where all have one."""
    digits, recipes = measure.digits, [(group.name, group.values(measure)) for group in groups]
    spreads = [
        f"{name} from {min(runs.values()):.{digits}f} to {max(runs.values()):.{digits}f}"
        for name, runs in recipes
        if len(runs) > 1
    ]
    if not spreads:
        return []
    deviation, freedom = residual_deviation([runs for _, runs in recipes], paired=False)
    spread = f"standard deviation {deviation:.{digits}f} (degrees of freedom: {freedom})"
    return [f"Seed noise, {measure.name}: {'; '.join(spreads)}; {spread}"]


def differences_together(pairs: list[Pair]) -> list[tuple[Pair, Interval]]:
    """Return the pairs of known difference with intervals whose family-wise error rate is 5 %.

    In rounds: pairs that were found to differ need no share of the 5 % in the next. The intervals of the last round are
    returned: zero lies outside where a pair differs significantly. All pairs are measured on the same text or items. If
    these tell too little about half of the pairs, the others get no bounds either, because they would be those whose
    noise happens to look small.
    """
    left = sum(pair.difference(1) is not None for pair in pairs)
    while True:
        intervals = [(pair, pair.difference(max(1, left))) for pair in pairs]
        found = [(pair, interval) for pair, interval in intervals if interval is not None]
        if 2 * sum(interval.low is None for _, interval in found) >= len(found) > 0:
            return [(pair, Interval(value=interval.value)) for pair, interval in found]
        still = sum(not interval.excludes_zero for _, interval in found)
        if still >= left:
            return found
        left = still


def verdict(pair: Pair, found: Interval) -> Statement:
    """Return the statement about a pair: one is better only where the interval covers seed noise and excludes zero."""
    measure, (one, other) = pair.measure, pair.groups
    shown = found if found.value > 0 or not found.excludes_zero or not pair.ranks_models else -found
    size, names = f"{shown.text(measure.digits)} {measure.unit}", f"{one.name} and {other.name}"
    has_bounds = found.low is not None and found.high is not None
    if found.low is None:
        text = f"{names}: cannot tell, for too little was measured to test the difference: {size}"
    elif not pair.ranks_models:
        text = f"{names} cannot be ranked with one fine-tuning each: {size}"
    elif not found.excludes_zero:
        text = f"{names} do not differ significantly: {size}"
    elif pair.noise is None:
        side = "above" if found.value > 0 else "below"
        text = f"{one.name} {one.verb} {side} {other.name} by {size}; no winner: the seed noise is unknown"
        return Statement(text, has_bounds, needs_seeds=True)
    else:
        better, worse = (one, other) if (found.value > 0) == measure.higher_is_better else (other, one)
        text = f"{better.name} {better.verb} better than {worse.name} by {size}"
    return Statement(text, has_bounds)
