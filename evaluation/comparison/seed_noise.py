"""How much models differ that were trained alike but for `random_seed`, where such are among those compared."""

import math

import attrs

from evaluation.comparison.measures import Measure, Result, subject
from evaluation.comparison.rows import Row
from evaluation.intervals import Interval, student_quantile


@attrs.frozen(kw_only=True)
class SeedNoise:
    """The spread of one measure over seeds of the training."""

    deviation: float  # standard, of one run
    freedom: int  # degrees: runs, less one for each recipe
    text: str


def seed_noise(measure: Measure, rows: list[Row], results: list[Result | None]) -> SeedNoise | None:
    """Return the spread of a measure, pooled over recipes; None where no recipe was trained with two seeds.

    `results`: what is shown of each row.
    """
    squares, freedom, texts = 0.0, 0, []
    for group in _repeated(measure, rows, results):
        values = list(group.values())
        mean = math.fsum(values) / len(values)
        squares += math.fsum((value - mean) ** 2 for value in values)
        freedom += len(values) - 1
        texts.append(f"{', '.join(group)} from {min(values):.{measure.digits}f} to {max(values):.{measure.digits}f}")
    if freedom == 0:
        return None
    deviation = math.sqrt(squares / freedom)
    text = f"Seed noise, {measure.name}: {'; '.join(texts)}; standard deviation {deviation:.{measure.digits}f}"
    told = "" if measure.difference is None else ", which is in the intervals of differences"
    return SeedNoise(deviation=deviation, freedom=freedom, text=text + told)


def widened(found: Interval, noise: SeedNoise | None, confidence: float) -> Interval:
    """Return an interval of a difference that holds for other seeds of both trainings as well.

    `confidence`: that of the interval. The noise of the text is in the spread over seeds, too: the interval is wider
    than need be, never narrower.
    """
    if noise is None or found.low is None or found.high is None:
        return found
    seeds = student_quantile((1 + confidence) / 2, noise.freedom) * math.sqrt(2) * noise.deviation
    return Interval(
        value=found.value,
        low=found.value - math.hypot(found.value - found.low, seeds),
        high=found.value + math.hypot(found.high - found.value, seeds),
    )


def _repeated(measure: Measure, rows: list[Row], results: list[Result | None]) -> list[dict[str, float]]:
    """Return, for each recipe and subject that several seeds were measured of, the values by model."""
    groups: dict[tuple[str, str], dict[int, tuple[str, float]]] = {}
    for row, result in zip(rows, results, strict=True):
        value = None if result is None else measure.read(result, measure.digits).value
        if result is not None and value is not None and row.recipe is not None and row.seed is not None:
            groups.setdefault((row.recipe, subject(result)), {}).setdefault(row.seed, (row.label, value))
    return [dict(seeds.values()) for seeds in groups.values() if len(seeds) > 1]
