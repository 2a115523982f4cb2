"""Mean scores of models on the same questions, and their differences, with intervals that hold for all pairs together.

The bootstrap draws questions, the same for all models, so that a hard question is hard for everybody; and, where each
model was fine-tuned with several seeds, seeds of each model by themselves (Owen, "The pigeonhole bootstrap", Annals of
Applied Statistics 1, 2007). Percentiles of few values are too narrow (Hesterberg, "What Teachers Should Know About the
Bootstrap", American Statistician 69, 2015): a draw takes one value less than there are, which makes its variance
unbiased, and the percentiles are those beyond which a normal has the tail that Student's t has beyond its own. With
several seeds the noise of single answers is counted in both directions: intervals are wider than need be, never
narrower. One seed cannot be drawn from: intervals are then over questions only, of that one fine-tuning, and do not
tell who is better.
"""

import math
from functools import cache
from statistics import NormalDist

import attrs
import numpy as np

CONFIDENCE = 0.95
DRAWS, CHUNK = 10_000, 1_000  # of the bootstrap; and how many are in memory together


@attrs.frozen(kw_only=True)
class Interval:
    """A value and where it would lie with other questions and seeds of the same kind."""

    value: float
    low: float | None  # None, as `high`, where there is one question: how much they differ is not known
    high: float | None

    def __neg__(self) -> "Interval":
        """Return the interval of b - a, where this one is of a - b."""
        low = None if self.high is None else -self.high
        return Interval(value=-self.value, low=low, high=None if self.low is None else -self.low)

    @property
    def apart(self) -> bool:
        """Tell whether zero is left out: as a difference it is more than noise."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def plus_minus(value: float, error: float | None, digits: int, *, signed: bool = False) -> str:
    """Return a value and its standard error, where there is one, for people."""
    value = round(value, digits) + 0.0  # -0.04 is 0.0, not -0.0
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"


def paired_intervals(scores: np.ndarray, *, seed: int = 0) -> tuple[list[Interval], dict[tuple[int, int], Interval]]:
    """Return each model's mean score, and the differences a - b of models a < b, with 95 % intervals.

    `scores`: float64 (M models, S seeds, Q questions), NaN where a question was not judged, which must be so for all
    models alike: ValueError. The intervals of the differences hold together (Bonferroni); those of the means hold one
    by one. Of fewer than ten questions they are too narrow: a draw cannot lie beyond what was seen. `seed`: of the
    draws, which are the same for the same scores.
    """
    judged = ~np.isnan(scores)
    if (judged != judged[0]).any() or not judged.any():
        raise ValueError("scores: wanted at least one judged question, and the same ones judged for all models")
    judged = judged[0]
    scores = scores[:, judged.any(1)][:, :, judged.any(0)]
    draws = _draw_means(scores, np.random.default_rng(seed))
    values = np.nanmean(scores, axis=(1, 2))
    questions = scores.shape[2]
    means = [_interval(value, drawn, CONFIDENCE, questions) for value, drawn in zip(values, draws, strict=True)]
    pairs = [(a, b) for b in range(len(values)) for a in range(b)]
    together = 1 - (1 - CONFIDENCE) / max(1, len(pairs))
    return means, {
        (a, b): _interval(values[a] - values[b], draws[a] - draws[b], together, questions) for a, b in sorted(pairs)
    }


@cache
def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t with `freedom` degrees, at least one; infinitely many are the normal's.

    With x = sqrt(freedom) * tan(angle) the density is cos(angle) ** (freedom - 1), which is added up over its angles.
    """
    if math.isinf(freedom):
        return NormalDist().inv_cdf(probability)
    angles = np.linspace(-math.pi / 2, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(probability, below / below[-1], angles))


def _draw_means(scores: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the mean of each model in each draw, float64 (M, DRAWS); NaN where a draw holds nothing judged."""
    models, seeds, questions = scores.shape
    judged = (~np.isnan(scores[0])).astype(np.float64)
    known = np.nan_to_num(scores)
    means = np.empty((models, DRAWS))
    for begin in range(0, DRAWS, CHUNK):
        of_questions = _weights(generator, questions)
        for model in range(models):
            of_seeds = _weights(generator, seeds)
            total = ((of_seeds @ known[model]) * of_questions).sum(1)
            weight = ((of_seeds @ judged) * of_questions).sum(1)
            means[model, begin : begin + CHUNK] = np.divide(total, weight, out=np.full(CHUNK, np.nan), where=weight > 0)
    return means


def _weights(generator: np.random.Generator, count: int) -> np.ndarray:
    """Return how often each of `count` values is in a draw of one less, float64 (CHUNK, count); always, if alone."""
    if count == 1:
        return np.ones((CHUNK, 1))
    drawn = generator.integers(count, size=(CHUNK, count - 1)) + count * np.arange(CHUNK)[:, None]
    return np.bincount(drawn.ravel(), minlength=CHUNK * count).reshape(CHUNK, count).astype(np.float64)


def _interval(value: float, draws: np.ndarray, confidence: float, questions: int) -> Interval:
    if questions == 1:
        return Interval(value=float(value), low=None, high=None)
    tail = NormalDist().cdf(-student_quantile((1 + confidence) / 2, questions - 1))
    low, high = np.nanquantile(draws, [tail, 1 - tail])
    return Interval(value=float(value), low=float(low), high=float(high))
