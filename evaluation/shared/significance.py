"""Statistics: Student's t, errors of means, seed noise, Dunnett's procedure, and intervals for judge scores.

`evaluate.py compare`, `evaluate.py judge` and `experiment.py sweep` all use this module, so that the same runs always
get the same verdict.

The noise of a training seed is estimated from recipes that were trained with several seeds. If two recipes share seeds,
their runs are paired by seed: any effect that a seed has on all recipes alike then cancels, for example the effect of
the order of the data. The error is pooled over all recipes. Pooling is wrong if one unstable recipe varies more than
the rest. Therefore, a difference must also be significant according to a second t-interval, which is computed from the
runs of the two compared recipes alone. With k comparisons, the level of this interval is 5% / k ** (2/3). The plain
Bonferroni level, 5% / k, would be valid for any variances, but would need one or two more seeds. The exponent 2/3 is
our choice; benchmarks/sweep_verdicts.py measures its effect.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import combinations
from statistics import NormalDist

import attrs
import numpy as np
from scipy import fft, optimize, special

ERROR = 0.05  # probability that any difference is reported when there is none
CONFIDENCE = 1 - ERROR
PAIRWISE_EXPONENT = 2 / 3
BAND_ERROR = 0.04  # level of `prediction_band` for a run's mean; for all single values together, the level is ERROR
# A judged difference must also be significant according to a t-interval that is computed only from the seeds of its two
# models. With two seeds per model, the level of this interval is PAIRWISE_ERROR_OF_TWO_SEEDS;
# benchmarks/judge_errors.py shows why no level gives both few errors and enough verdicts. With more seeds, the level is
# PAIRWISE_ERROR_OF_SEEDS plus PAIRWISE_ERROR_BY_P_VALUE times a p-value, that is, between 3% and 23%. The p-value is
# from a test of whether one of the two models varies more than all other models: if so, the p-value is close to 0.
PAIRWISE_ERROR_OF_TWO_SEEDS, PAIRWISE_ERROR_OF_SEEDS, PAIRWISE_ERROR_BY_P_VALUE = 0.12, 0.03, 0.2
POWER = 0.9  # probability of detecting a difference that we call detectable
SOUGHT_DEVIATIONS = 3.0  # difference, in standard deviations over seeds, that the default number of seeds must detect
_NODES, _CELLS, _REACH = 96, 200, 8.5  # quadrature nodes; grid cells; bound of the integral in standard deviations
# Parameters of the candidate spectra of a stream of units. Each spectrum is a first-order autoregression plus a share
# of noise that is independent between units.
_CORRELATIONS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.98, 0.99)
_FRESH_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
# With fewer than _LEAST_UNITS units, correlation is not considered. More than _MOST_UNITS units are summed in groups.
_LEAST_UNITS, _MOST_UNITS = 8, 1024
# A model with correlation has two more parameters than a model of independent units, so it is preferred only if twice
# its log-likelihood is higher by at least this amount.
_PREFERRED = 4.0
# Spectra are compared by twice their log-likelihood. Those within this amount of the best one are considered, and the
# most cautious of them is used.
_AS_LIKELY = 1.0
# Only the lowest frequencies are used. Their number is as large as possible, provided that their mean power, according
# to the spectrum, is at least this share of the power at frequency zero.
_FLAT = 0.65

Runs = Mapping[int, float]  # the measured value of each run of a recipe, by training seed


@attrs.frozen(kw_only=True)
class Interval:
    """An estimate with the bounds of its confidence interval."""

    value: float
    low: float | None = None  # `low` and `high` are None for a single unit, because the spread is unknown
    high: float | None = None
    error: float | None = None  # standard error, if the bounds come from Student's t

    def __neg__(self) -> "Interval":
        """Return the interval of b - a, given that this is the interval of a - b."""
        low = None if self.high is None else -self.high
        return Interval(value=-self.value, low=low, high=None if self.low is None else -self.low, error=self.error)

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is outside the bounds, that is, whether a difference is significant."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    def widened(self, reach: float, error: float | None = None) -> "Interval":
        """Return this interval after adding an independent source of error.

        `reach` is the half width of an interval for the added error alone, and `error` is its standard error.

        If both standard errors are known, the result is Student's interval of the summed errors. Its critical value is
        the mean of the two critical values, weighted by the squares of the errors (Cochran, Biometrics 20, 1964), so
        that a small error with few degrees of freedom has little effect. The probability of reporting a false
        difference is at most 5%, or 6.2% if one error has a single degree of freedom and is several times as large as
        the other error. If either standard error is unknown, the half widths are added in quadrature, which gives a
        wider interval.
        """
        if self.low is None or self.high is None:
            return self
        low, high = self.value - self.low, self.high - self.value
        total = None
        if self.error is None or error is None or self.error == error == 0:
            low, high = math.hypot(low, reach), math.hypot(high, reach)
        else:
            total = math.hypot(self.error, error)
            low, high = ((self.error * side + error * reach) / total for side in (low, high))
        return Interval(value=self.value, low=self.value - low, high=self.value + high, error=total)

    def record(self) -> dict[str, float | None]:
        """Return the fields that represent the interval in a stored result."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def text(self, digits: int, sign: str = "") -> str:
        """Return the value, followed by the bounds in brackets if they are known.

        `sign`: "+" to show a sign before positive numbers as well.
        """
        value = f"{self.value:{sign}.{digits}f}"
        if self.low is None or self.high is None:
            return value
        return f"{value} [{self.low:{sign}.{digits}f}, {self.high:{sign}.{digits}f}]"


@attrs.frozen(kw_only=True)
class SeedNoise:
    """Standard errors, over training seeds, of the difference between two recipes."""

    pooled: float  # estimated from all recipes
    freedom: float  # degrees of freedom; infinite if the user stated the deviation
    pairwise: float = 0.0  # estimated only from the runs of the two recipes
    pairwise_freedom: float = 1.0

    def reach(self, comparisons: int, critical: float | None = None) -> float:
        """Return the half width of the interval for a difference.

        `comparisons`: the number of differences that are tested together. `critical`: the critical value to use with
        the pooled error; None: Bonferroni's.
        """
        return max(self._reaches(comparisons, critical))

    def added_to(self, difference: Interval, comparisons: int) -> Interval:
        """Return the interval of a difference, widened by this seed noise.

        `comparisons`: the number of differences that are tested together, including this one.

        The interval is widened in two ways: by the pooled error, and by the error estimated from the two recipes' own
        runs. The wider result is returned. Both results become wider as the number of comparisons grows, so the
        returned interval does, too.
        """
        pooled_reach, pairwise_reach = self._reaches(comparisons, None)
        candidates = [
            difference.widened(pooled_reach, self.pooled),
            difference.widened(pairwise_reach, self.pairwise),
        ]
        return max(
            candidates,
            key=lambda interval: 0.0 if interval.low is None or interval.high is None else interval.high - interval.low,
        )

    def _reaches(self, comparisons: int, critical: float | None) -> tuple[float, float]:
        """Return two half widths for a difference: one from the pooled error, and one from the pairwise error."""
        if critical is None:
            critical = student_quantile(1 - ERROR / comparisons / 2, self.freedom)
        return critical * self.pooled, pairwise_quantile(comparisons, self.pairwise_freedom) * self.pairwise


def plus_minus(value: float, error: float | None, digits: int) -> str:
    text = f"{round(value, digits) + 0.0:.{digits}f}"  # adding 0.0 turns -0.0, such as -0.04 after rounding, into 0.0
    return text if error is None else f"{text} ± {error:.{digits}f}"


def student_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t distribution.

    `freedom` is positive; if it is infinite, the distribution is normal.
    """
    if math.isinf(freedom):
        return NormalDist().inv_cdf(probability)
    return float(special.stdtrit(freedom, probability))


def student_interval(value: float, error: float | None, freedom: float, confidence: float = CONFIDENCE) -> Interval:
    """Return Student's interval of a value. It has no bounds if the standard error is None."""
    if error is None:
        return Interval(value=value)
    reach = student_quantile((1 + confidence) / 2, freedom) * error
    return Interval(value=value, low=value - reach, high=value + reach, error=error)


def mean_and_error(values: np.ndarray, sizes: np.ndarray | None = None) -> tuple[float, float | None]:
    """Return the mean and its standard error, which is None for a single unit.

    With `sizes`, the mean is the sum of `values` divided by the sum of `sizes`. A mean over tokens is such a ratio: the
    sampled units are documents, because the tokens of a document are correlated (Cochran, Sampling Techniques, 3rd ed.
    1977, section 2.11). If `values` are differences between two models, the error is that of a paired comparison.
    """
    sizes = np.ones(len(values)) if sizes is None else sizes
    total = float(sizes.sum())
    mean = float(values.sum()) / total
    number = len(values)
    if number < 2:
        return mean, None
    squares = float(np.square(values - mean * sizes).sum())
    return mean, math.sqrt(squares * number / (number - 1)) / total


def hits_error(values: np.ndarray, step: float, *, paired: bool) -> float | None:
    """Return the standard error of a mean over items that were either hit or missed, or None for a single item.

    `step`: the value of a hit minus the value of a miss. `paired`: the values are differences between two models, which
    are 0 if both models hit or both miss an item.

    If all items are hits, if all are misses, or if the models never differ, the plain error is 0, as if no other sample
    could have given a different mean. Therefore, the error is never smaller than it would be with two additional items.
    One of these items is a hit, and the other one is a miss (Agresti and Coull, American Statistician 52, 1998). If
    `paired`, the models agree on one additional item and differ on the other one, which counts half for each model
    (Agresti and Min, Statistics in Medicine 24, 2005).
    """
    error, number = mean_and_error(values)[1], len(values) + 2
    if error is None:
        return None
    low = float(values.min())
    added_sum, added_squares = (0.0, step**2) if paired else (2 * low + step, low**2 + (low + step) ** 2)
    mean = (float(values.sum()) + added_sum) / number
    variance = (float(np.square(values).sum()) + added_squares) / number - mean**2
    return max(error, math.sqrt(max(0.0, variance) / number))


@attrs.frozen(kw_only=True)
class StreamMean:
    """The mean of a stream of units in which neighboring units may be correlated."""

    value: float
    error: float | None  # standard error; None for a single unit
    freedom: float  # degrees of freedom of the error
    independent: float  # number of independent units that would give this error; at most the number of units

    def error_for(self, freedom: float) -> float | None:
        """Return the error to report if the reader will assume `freedom` degrees of freedom.

        The reader then gets the same 95% interval.
        """
        if self.error is None:
            return None
        probability = (1 + CONFIDENCE) / 2
        return self.error * student_quantile(probability, self.freedom) / student_quantile(probability, freedom)


def stream_mean(values: np.ndarray, sizes: np.ndarray) -> StreamMean:
    """Return the sum of `values` divided by the sum of `sizes`, with an error that accounts for correlated units.

    The units must be in the order of the stream. Neighboring documents of a corpus are often similar. An error that
    treats them as independent is then too small, by half or more. Therefore, the units' deviations from the mean are
    transformed to frequencies (cosines). For independent units, the power is the same at all frequencies. If a spectrum
    of correlated units explains the powers better, according to Whittle's likelihood, the variance is estimated from
    the mean power of the lowest frequencies only. According to the spectrum, this mean is a certain share of the power
    at frequency zero, so it is divided by that share. Each of these frequencies adds a degree of freedom (Mueller,
    Journal of Econometrics 141, 2007; Lazarus et al., Journal of Business and Economic Statistics 36, 2018). If no such
    spectrum explains the powers better, the error is the one that `mean_and_error` returns.

    Correlation that extends over more units than the stream has cannot be detected. benchmarks/document_errors.py
    measures how often the intervals cover the true value.
    """
    mean, error = mean_and_error(values, sizes)
    number, freedom = len(values), ratio_freedom(sizes)
    deviations = values - mean * sizes
    independent = StreamMean(value=mean, error=error, freedom=freedom, independent=number)
    if number < _LEAST_UNITS or error is None or error <= 1e-12 * abs(mean):
        return independent
    if number > _MOST_UNITS:
        deviations = np.add.reduceat(deviations, np.arange(_MOST_UNITS) * number // _MOST_UNITS)
    powers = np.square(fft.dct(deviations, norm="ortho")[1:])
    frequencies, variance = _power_at_zero(powers)
    grouped_error = math.sqrt(variance * len(deviations)) / float(sizes.sum())
    if frequencies == len(powers):
        return independent if number <= _MOST_UNITS else attrs.evolve(independent, error=grouped_error)
    effective_units = number * (error / grouped_error) ** 2 if grouped_error else float(number)
    return StreamMean(
        value=mean,
        error=grouped_error,
        freedom=min(freedom, frequencies),
        independent=max(1.0, min(number, effective_units)),
    )


def _power_at_zero(powers: np.ndarray) -> tuple[int, float]:
    """Estimate the power at frequency zero. Return the number of lowest frequencies that were used, and the power."""
    shapes, logarithms, flatness = _spectra(len(powers))
    likelihood = -0.5 * (logarithms + len(powers) * np.log(shapes @ powers / len(powers)))
    deficits = 2 * (likelihood.max() - likelihood)  # one per spectrum; the first spectrum belongs to independent units
    if deficits[0] < _PREFERRED:
        return len(powers), float(powers.mean())
    likely = np.flatnonzero(deficits <= _AS_LIKELY)
    counts = np.maximum(1, (flatness[likely] >= _FLAT).sum(axis=1))
    chosen = int(counts.argmin())
    count = int(counts[chosen])
    return count, float(powers[:count].mean() / flatness[likely[chosen], count - 1])


@lru_cache(maxsize=8)
def _spectra(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays that describe the candidate spectra at `number` frequencies above zero.

    The first spectrum belongs to independent units. For each spectrum, the first array has its inverse (spectra,
    frequencies), and the second array has the sum of the logarithms of its powers (spectra,). The third array has the
    spectrum's mean power over the lowest 1, 2, ... frequencies, as a share of its power at zero (spectra, frequencies).
    """
    cosines = np.cos(np.pi * np.arange(1, number + 1) / (number + 1))
    rows, at_zero = [np.ones(number)], [1.0]
    for correlation in _CORRELATIONS:
        for fresh in _FRESH_SHARES:
            scaled = (1 - fresh) * (1 - correlation**2)
            rows.append(fresh + scaled / (1 - 2 * correlation * cosines + correlation**2))
            at_zero.append(fresh + scaled / (1 - correlation) ** 2)
    spectra = np.array(rows)
    means = np.cumsum(spectra, axis=1) / np.arange(1, number + 1)
    return 1 / spectra, np.log(spectra).sum(axis=1), means / np.array(at_zero)[:, None]


def prediction_band(values: np.ndarray, apart: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper bounds, both (M,), that should contain all M values of a further run.

    `values` (R, M): the values of R runs at M places, for example steps. `apart`: two values that are at least this
    number of places apart are assumed to have independent noise.

    The band is Student's interval of one further observation (Hahn and Meeker, Statistical Intervals, 1991, section
    4.7) with Bonferroni's level. The variance at a place is the mean of the variances at all M places. If the mean over
    the places up to `apart` away is larger, this mean is used instead. A run may also deviate by the same amount at all
    places, and there are only R - 1 degrees of freedom for such deviations. Therefore, the band is never narrower than
    Student's interval for the mean of a further run over all places. benchmarks/band_errors.py measures the error rate
    of the complete band.
    """
    runs, number = values.shape
    variances, mean = values.var(axis=0, ddof=1), values.mean(axis=0)
    near = []
    for place in range(number):
        reach = min(apart, place + 1)  # the first values are means over fewer steps, so they vary more than later ones
        near.append(variances[max(0, place - reach) : place + reach + 1].mean())
    critical = student_quantile(1 - ERROR / number / 2, (runs - 1) * number / apart)
    mean_reach = student_quantile(1 - BAND_ERROR / 2, runs - 1) * values.mean(axis=1).std(ddof=1)
    half = np.maximum(critical * np.sqrt(np.maximum(near, variances.mean())), mean_reach) * math.sqrt(1 + 1 / runs)
    return mean - half, mean + half


def ratio_freedom(sizes: np.ndarray) -> float:
    """Return the degrees of freedom, at least 1, of a mean over units of these sizes (Kish, Survey Sampling, 1965)."""
    return max(1.0, float(sizes.sum()) ** 2 / float(np.square(sizes).sum()) - 1)


def combined_error(*parts: tuple[float, float]) -> tuple[float, float]:
    """Return the standard error of a sum of independent terms, and its degrees of freedom.

    `parts`: the standard error and degrees of freedom of each term (Satterthwaite, Biometrics Bulletin 2, 1946).
    """
    variance = math.fsum(error**2 for error, _ in parts)
    spread = math.fsum(error**4 / freedom for error, freedom in parts)
    return math.sqrt(variance), variance**2 / spread if spread else math.inf


def residual_deviation(recipes: Sequence[Runs], *, paired: bool) -> tuple[float, int]:
    """Return the standard deviation between runs of a recipe with different seeds, and its degrees of freedom.

    `paired`: remove the effect that a seed has on all recipes alike.
    """
    runs = [(number, seed, value) for number, recipe in enumerate(recipes) for seed, value in recipe.items()]
    seeds = {seed: index for index, seed in enumerate(dict.fromkeys(seed for _, seed, _ in runs))}
    layout = np.zeros((len(runs), len(recipes) + len(seeds) * paired))
    for row, (number, seed, _) in enumerate(runs):
        layout[row, number] = 1
        if paired:
            layout[row, len(recipes) + seeds[seed]] = 1
    values = np.array([value for *_, value in runs])
    effects, _, rank, _ = np.linalg.lstsq(layout, values - values.mean(), rcond=None)
    freedom = len(runs) - int(rank)
    squares = float(np.square(values - values.mean() - layout @ effects).sum())
    return math.sqrt(squares / freedom) if freedom else 0.0, freedom


def shared_seeds(first: Runs, second: Runs) -> list[int]:
    """Return the seeds that two recipes share, or [] if they share fewer than two. Runs are paired by these seeds."""
    seeds = sorted(first.keys() & second.keys())
    return seeds if len(seeds) > 1 else []


def seed_noise(
    recipes: Sequence[Runs], first: Runs, second: Runs, stated_deviation: float | None = None
) -> SeedNoise | None:
    """Return the seed noise of the difference between two recipes, or None if either has only one run.

    The runs are paired if the two recipes share at least two seeds. `stated_deviation`: the standard deviation between
    the runs of a recipe, as the user stated it; None: estimate it. If it is stated, one run per recipe is enough.
    """
    seeds = shared_seeds(first, second)
    scale = math.sqrt(2 / len(seeds) if seeds else 1 / len(first) + 1 / len(second))
    if stated_deviation is not None:
        return SeedNoise(pooled=stated_deviation * scale, freedom=math.inf)
    if min(len(first), len(second)) < 2:
        return None
    samples = [[first[seed] - second[seed] for seed in seeds]] if seeds else [[*first.values()], [*second.values()]]
    pairwise, pairwise_freedom = combined_error(
        *((mean_and_error(np.array(sample))[1] or 0.0, len(sample) - 1) for sample in samples)
    )
    deviation, freedom = residual_deviation(recipes, paired=bool(seeds))
    return SeedNoise(pooled=deviation * scale, freedom=freedom, pairwise=pairwise, pairwise_freedom=pairwise_freedom)


def pairwise_quantile(comparisons: int, freedom: float) -> float:
    """Return the critical value for the error that is estimated only from the two compared recipes."""
    return student_quantile(1 - ERROR / comparisons**PAIRWISE_EXPONENT / 2, freedom)


@cache
def dunnett_quantile(comparisons: int, freedom: float) -> float:
    """Return Dunnett's two-sided critical value for `comparisons` differences from one base.

    The base and the variants must have equal numbers of seeds. Dunnett (1955, JASA 50, 1096) bounds the largest of k
    statistics that share the base and a pooled error, so that their correlation is 1/2:

        P(max |T| <= c) = E over s and z of [Phi(sqrt(2) c s + z) - Phi(-sqrt(2) c s + z)] ** k

    Here z is normal, and s ** 2 is chi-squared divided by its degrees of freedom. The expectation is computed by
    Gauss-Legendre quadrature, because scipy's multivariate_t integrates k dimensions by random sampling.
    """
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    base = _REACH * nodes
    density = _REACH * weights * np.exp(-base * base / 2) / math.sqrt(2 * math.pi)
    scale = np.sqrt(special.chdtri(freedom, 1 - (nodes + 1) / 2) / freedom)[:, None]

    def excess(critical: float) -> float:
        reach = math.sqrt(2) * critical * scale
        inside = special.ndtr(reach + base) - special.ndtr(-reach + base)
        return float(weights / 2 @ (inside**comparisons @ density)) - CONFIDENCE

    return float(optimize.brentq(excess, 1.0, 1000.0))


@cache
def power(shift: float, comparisons: int, seeds: int) -> float:
    """Return the probability of detecting that a variant differs by `shift` standard errors from the base.

    All variances are assumed to be equal. There are `comparisons` variants with `seeds` seeds each.
    """
    pairwise_critical = pairwise_quantile(comparisons, seeds - 1)
    pooled_critical = dunnett_quantile(comparisons, comparisons * (seeds - 1))
    probabilities = (np.arange(_CELLS) + 0.5) / _CELLS
    freedom, rest = seeds - 1, (comparisons - 1) * (seeds - 1)
    pair_squares = special.chdtri(freedom, 1 - probabilities)[:, None]
    rest_squares = special.chdtri(rest, 1 - probabilities)[None, :] if rest else np.zeros((1, 1))
    reach = np.maximum(
        pairwise_critical * np.sqrt(pair_squares / freedom),
        pooled_critical * np.sqrt((pair_squares + rest_squares) / (freedom + rest)),
    )
    return float(np.mean(special.ndtr(shift - reach) + special.ndtr(-shift - reach)))


@cache
def detectable_deviations(comparisons: int, seeds: int) -> float:
    """Return the difference that is detected with probability POWER.

    Its unit is the standard deviation between runs that differ only in their seeds.
    """
    return detectable_shift(lambda shift: power(shift, comparisons, seeds)) * math.sqrt(2 / seeds)


def detectable_shift(probability: Callable[[float], float]) -> float:
    """Return the positive shift that is detected with probability POWER.

    `probability`: a function that returns the probability of detecting a shift. It must increase with the shift.
    """
    upper_bound = 1.0
    while probability(upper_bound) < POWER:
        upper_bound *= 2
    return float(optimize.brentq(lambda shift: probability(shift) - POWER, 0.0, upper_bound, xtol=1e-6))


def default_seeds(comparisons: int) -> int:
    """Return the smallest number of seeds with which a difference of SOUGHT_DEVIATIONS is detected."""
    return next(seeds for seeds in range(2, 100) if detectable_deviations(comparisons, seeds) <= SOUGHT_DEVIATIONS)


def two_way_intervals(scores: np.ndarray) -> tuple[list[Interval], dict[tuple[int, int], Interval]]:
    """Return each model's mean score, and the difference a - b of each pair of models a < b, with 95% intervals.

    `scores`: float64 (M models, S fine-tuning seeds, Q questions); NaN marks a question that was not judged. Raises
    ValueError unless the same questions were judged for all models.

    Questions are paired, but seeds are not. The variance over seeds is pooled over models. As a safeguard, each
    interval is at least as wide as a t-interval that uses only the seeds of its model, or of its two models. The level
    of this t-interval depends on whether these models vary more than the others (`_pairwise_error`). With two seeds,
    the safeguard is weak: the intervals assume that the seeds of all models vary alike. The error over questions and
    the error over seeds both include the noise of single answers, so the intervals are conservative. With one seed,
    they cover only the choice of questions and do not show which model is better. The intervals of the differences are
    simultaneous (Bonferroni).
    """
    judged = ~np.isnan(scores)
    if (judged != judged[0]).any() or not judged.any():
        raise ValueError("scores: wanted at least one judged question, and the same questions judged for all models")
    scores = scores[:, judged[0].any(1)][:, :, judged[0].any(0)]
    models, seeds, questions = scores.shape
    counts = (~np.isnan(scores[0])).sum(0)
    sums = np.nansum(scores, axis=1)  # (M, Q)
    freedom = models * (seeds - 1)
    # Variance of each model's mean over seeds (M,)
    variances = np.nanmean(scores, axis=2).var(axis=1, ddof=1) / seeds if freedom else np.zeros(models)
    pooled = float(variances.mean())

    def interval(question_sums: np.ndarray, sides: tuple[int, ...], confidence: float) -> Interval:
        value, error = mean_and_error(question_sums, counts)
        over_questions = student_interval(value, error, questions - 1, confidence)
        if not freedom:
            return over_questions
        pooled_reach = student_quantile((1 + confidence) / 2, freedom) * math.sqrt(len(sides) * pooled)
        seed_error, seed_freedom = combined_error(*((math.sqrt(variances[model]), seeds - 1) for model in sides))
        critical = student_quantile(1 - _pairwise_error(variances, sides, seeds) / 2, seed_freedom)
        return over_questions.widened(max(pooled_reach, critical * seed_error))

    pairs = list(combinations(range(models), 2))
    simultaneous = 1 - ERROR / max(1, len(pairs))
    means = [interval(sums[model], (model,), CONFIDENCE) for model in range(models)]
    return means, {(a, b): interval(sums[a] - sums[b], (a, b), simultaneous) for a, b in pairs}


def _pairwise_error(variances: np.ndarray, sides: tuple[int, ...], seeds: int) -> float:
    """Return the level of the t-interval that uses only the seeds of the one or two models in `sides`.

    `variances` (M,): the variance of each model's mean over seeds. An F-test compares the larger variance in `sides`
    with the mean of all other models' variances. The larger the p-value of this test, the less reason there is to doubt
    the pooled variance, and the narrower the t-interval may be.
    """
    if seeds == 2:
        return PAIRWISE_ERROR_OF_TWO_SEEDS
    widest = max(sides, key=lambda model: float(variances[model]))
    other_variances = np.delete(variances, widest)
    if not other_variances.any():
        return PAIRWISE_ERROR_OF_SEEDS
    p_value = special.fdtrc(seeds - 1, (seeds - 1) * len(other_variances), variances[widest] / other_variances.mean())
    return PAIRWISE_ERROR_OF_SEEDS + PAIRWISE_ERROR_BY_P_VALUE * float(p_value)
