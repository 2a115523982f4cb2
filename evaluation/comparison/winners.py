"""Decide which differences between recipes are significant, given the noise of the text and of the training seed.

No winner is named if the seed noise is unknown, because that noise is larger than the interval that covers the choice
of text. All pairs of a measure are tested together by Holm's procedure, at a level of 5% (Scandinavian Journal of
Statistics 6, 1979).
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

NAMED_MODELS = 3  # approximate largest number of models that a statement lists by name


@attrs.frozen(kw_only=True)
class Group:
    """Models that share a recipe and were measured on the same data.

    A model whose recipe is unknown forms its own group.
    """

    labels: list[str]  # the labels of all models
    results: dict[int, EvaluationResult]  # by training seed; a negative key stands for an unknown seed

    @property
    def name(self) -> str:
        count, more = len(self.results), len(self.labels) - NAMED_MODELS
        names = ", ".join(self.labels if more < 2 else [*self.labels[:NAMED_MODELS], f"{more} more"])
        return names + (f" ({count} seeds)" if count > 1 else "")

    @property
    def verb(self) -> str:
        return "is" if len(self.labels) == 1 else "are"

    def values(self, measure: Measure) -> Runs:
        """Return the measured values by training seed."""
        measurements = {seed: result.measurement(measure) for seed, result in self.results.items()}
        return {seed: measurement.value for seed, measurement in measurements.items() if measurement is not None}


@attrs.frozen
class Statement:
    """A sentence about two recipes, with flags for the explanations that must be shown with it."""

    text: str
    has_bounds: bool = False  # the text shows an interval
    needs_seeds: bool = False  # the text names no winner, because the seed noise is unknown


@attrs.frozen(kw_only=True)
class Pair:
    """Two recipes whose difference is tested. `noise` is None if the seed noise is unknown."""

    measure: Measure
    groups: tuple[Group, Group]
    noise: SeedNoise | None

    @property
    def ranks_models(self) -> bool:
        """True if the intervals cover all sources of chance, including fine-tuning."""
        return all(result.ranks_models for result in self.groups[0].results.values())

    def difference(self, comparisons: int) -> Interval | None:
        """Return the first group's mean minus the second group's, or None if there is no paired data.

        The interval covers the noise of the text and, if known, of the seeds. Its level accounts for the number of
        comparisons.
        """
        assert self.measure.difference is not None
        values = [group.values(self.measure) for group in self.groups]
        seeds = shared_seeds(*values)
        first_samples, second_samples = (
            [
                measurement.sample
                for seed in seeds or runs
                if (measurement := group.results[seed].measurement(self.measure))
            ]
            for group, runs in zip(self.groups, values, strict=True)
        )
        interval = self.measure.difference(first_samples, second_samples, 1 - ERROR / comparisons)
        return interval if interval is None or self.noise is None else self.noise.added_to(interval, comparisons)


def find_winners(
    measure: Measure, rows: list[Row], results: list[EvaluationResult | None], stated_deviation: float | None
) -> tuple[list[Statement], list[str]]:
    """Return statements about a measure, and notes about its seed noise. `results`: the result that each row shows."""
    statements, notes = list[Statement](), list[str]()
    for subject_groups in group_by_recipe(rows, results):
        groups = [group for group in subject_groups if group.values(measure)]
        notes += seed_note(measure, groups)
        if measure.difference is None:
            continue
        runs = [group.values(measure) for group in groups]
        pairs = [
            Pair(
                measure=measure,
                groups=(first, second),
                noise=seed_noise(runs, first_runs, second_runs, stated_deviation),
            )
            for (first, first_runs), (second, second_runs) in combinations(zip(groups, runs, strict=True), 2)
        ]
        verdicts = [verdict(pair, interval) for pair, interval in differences_together(pairs)]
        names = [group.name for group in groups if len(group.labels) > 1]
        verdicts += [Statement(f"{name} are runs of the same recipe: their difference is noise") for name in names]
        statements += [attrs.evolve(statement, text=f"{measure.name}: {statement.text}") for statement in verdicts]
    return statements, notes


def group_by_recipe(rows: list[Row], results: list[EvaluationResult | None]) -> list[list[Group]]:
    """Return a list of groups for each subject, in the order of the rows. `results`: the result that each row shows."""
    subjects: dict[str, dict[object, Group]] = {}
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        if result is not None:
            recipes = subjects.setdefault(result.subject, {})
            group = recipes.setdefault(index if row.recipe is None else row.recipe, Group(labels=[], results={}))
            group.labels.append(row.label)
            group.results.setdefault(-1 - index if row.seed is None else row.seed, result)
    return [list(recipes.values()) for recipes in subjects.values()]


def seed_note(measure: Measure, groups: list[Group]) -> list[str]:
    """Return a list with a note on the spread of each recipe over its seeds, or [] if no recipe has several runs."""
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
    """Return the pairs whose difference is known, with intervals whose family-wise error rate is 5%.

    The test has rounds: pairs that were found to differ do not need a share of the 5% in the next round. The intervals
    of the last round are returned, and a pair differs significantly if its interval excludes zero. All pairs were
    measured on the same text or items. If there is so little text that at least half of the pairs cannot be tested, no
    pair gets bounds: the pairs that can be tested would merely be those whose noise happens to look small.
    """
    undecided = sum(pair.difference(1) is not None for pair in pairs)
    while True:
        intervals = [(pair, pair.difference(max(1, undecided))) for pair in pairs]
        differences = [(pair, interval) for pair, interval in intervals if interval is not None]
        if 2 * sum(interval.low is None for _, interval in differences) >= len(differences) > 0:
            return [(pair, Interval(value=interval.value)) for pair, interval in differences]
        still_undecided = sum(not interval.excludes_zero for _, interval in differences)
        if still_undecided >= undecided:
            return differences
        undecided = still_undecided


def verdict(pair: Pair, difference: Interval) -> Statement:
    """Return the statement about a pair.

    A recipe is called better only if the interval of the difference accounts for the seed noise and excludes zero.
    """
    measure, (first, second) = pair.measure, pair.groups
    is_shown_as_is = difference.value > 0 or not difference.excludes_zero or not pair.ranks_models
    shown = difference if is_shown_as_is else -difference
    size, names = f"{shown.text(measure.digits)} {measure.unit}", f"{first.name} and {second.name}"
    has_bounds = difference.low is not None and difference.high is not None
    if difference.low is None:
        text = f"{names}: cannot tell, because too little was measured to test the difference: {size}"
    elif not pair.ranks_models:
        text = f"{names} cannot be ranked with one fine-tuning run each: {size}"
    elif not difference.excludes_zero:
        text = f"{names} do not differ significantly: {size}"
    elif pair.noise is None:
        side = "above" if difference.value > 0 else "below"
        text = f"{first.name} {first.verb} {side} {second.name} by {size}; no winner: the seed noise is unknown"
        return Statement(text, has_bounds, needs_seeds=True)
    else:
        better, worse = (first, second) if (difference.value > 0) == measure.higher_is_better else (second, first)
        text = f"{better.name} {better.verb} better than {worse.name} by {size}"
    return Statement(text, has_bounds)
