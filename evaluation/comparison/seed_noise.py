"""Seed noise: standard deviation of a measure over runs that differ only in `random_seed`.

Such runs share a recipe: all settings that change a result by more than rounding (evaluation/comparison/rows.py). The
variance over seeds is pooled over recipes, as in a one-way analysis of variance: degrees of freedom add up.
"""

import math
from statistics import fmean

import attrs

from evaluation.comparison.rows import Row
from evaluation.shared.measure import EvaluationResult, Measure, Measurement
from evaluation.shared.significance import Interval, student_quantile

NAMED = 3  # models listed by name in a statement


@attrs.frozen(kw_only=True)
class Group:
    """Models of one recipe measured on the same data. A model of unknown recipe is a group of its own."""

    labels: list[str]  # of all models
    results: list[EvaluationResult]  # one for each training seed

    @property
    def name(self) -> str:
        """The group's name in a statement."""
        count, more = len(self.results), len(self.labels) - NAMED
        names = ", ".join(self.labels if more < 2 else [*self.labels[:NAMED], f"{more} more"])
        return names + (f" ({count} seeds)" if count > 1 else "")

    @property
    def verb(self) -> str:
        """Verb of a statement about the group."""
        return "is" if len(self.labels) == 1 else "are"

    def measurements(self, measure: Measure) -> list[Measurement]:
        """Return the measurements of a measure, one for each seed that has one."""
        return [found for result in self.results if (found := result.measurement(measure)) is not None]


@attrs.frozen(kw_only=True)
class SeedNoise:
    """The standard deviation of one measure over seeds of the training."""

    deviation: float  # of a single run
    freedom: float  # degrees of freedom: runs less one for each recipe; infinite where the user stated the deviation


def group_by_recipe(rows: list[Row], results: list[EvaluationResult | None]) -> list[list[Group]]:
    """Return the groups of each subject, in the order of the rows. `results`: the result shown for each row."""
    members: dict[str, dict[object, list[tuple[Row, EvaluationResult]]]] = {}
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        if result is not None:
            key = index if row.recipe is None else row.recipe
            members.setdefault(result.subject, {}).setdefault(key, []).append((row, result))
    return [[_group(member) for member in recipes.values()] for recipes in members.values()]


def _group(members: list[tuple[Row, EvaluationResult]]) -> Group:
    seeds: dict[int | None, EvaluationResult] = {}
    for row, result in members:
        seeds.setdefault(row.seed, result)
    return Group(labels=[row.label for row, _ in members], results=list(seeds.values()))


def pooled_noise(measure: Measure, groups: list[Group]) -> tuple[SeedNoise | None, str | None]:
    """Return the noise of a measure, and a note; None where no recipe was trained with two seeds."""
    squares, freedom, texts, digits = 0.0, 0, [], measure.digits
    for group in groups:
        values = [one.value for one in group.measurements(measure)]
        if len(values) > 1:
            mean = fmean(values)
            squares += math.fsum((value - mean) ** 2 for value in values)
            freedom += len(values) - 1
            texts.append(f"{group.name} from {min(values):.{digits}f} to {max(values):.{digits}f}")
    if freedom == 0:
        return None, None
    deviation = math.sqrt(squares / freedom)
    spread = f"standard deviation {deviation:.{digits}f}, {freedom} degree{'s' if freedom > 1 else ''} of freedom"
    noise = SeedNoise(deviation=deviation, freedom=freedom)
    return noise, f"Seed noise, {measure.name}: {'; '.join(texts)}; {spread}"


def widened(found: Interval, noise: SeedNoise, seeds: tuple[int, int], confidence: float) -> Interval:
    """Return the interval of a difference of means over so many seeds, widened by the seed noise of both.

    `confidence`: that of the interval. The spread over seeds contains noise of the text as well: the interval is
    conservative.
    """
    if found.low is None or found.high is None:
        return found
    deviation = noise.deviation * math.sqrt(1 / seeds[0] + 1 / seeds[1])
    reach = student_quantile((1 + confidence) / 2, noise.freedom) * deviation
    low, high = math.hypot(found.value - found.low, reach), math.hypot(found.high - found.value, reach)
    return Interval(value=found.value, low=found.value - low, high=found.value + high)
