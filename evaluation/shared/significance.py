"""Statistics: Student's t, errors of means, seed noise, Holm's and Dunnett's families, and two-way judge scores.

One engine for evaluate.py compare and judge and for experiment.py sweep, so that the same runs get one verdict. The
noise of a training seed is told from recipes with several seeds, paired by seed where two recipes share seeds: what a
seed does to all recipes alike, such as the order of the data, cancels. The error is pooled over recipes. That is wrong
where one recipe, an unstable one, scatters more than the rest, so a difference must also lie outside the t-interval of
the two recipes' own runs, at the level 5 % / k ** (2/3) of k comparisons. Plain Bonferroni, 5 % / k, would hold for any
variances, but needs a seed or two more; the exponent is our choice: benchmarks/sweep_verdicts.py measures it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import combinations
from statistics import NormalDist

import attrs
import numpy as np
from scipy import fft, optimize, special

ERROR = 0.05  # probability of any false difference, where none is
CONFIDENCE = 1 - ERROR
OWN_EXPONENT = 2 / 3
BAND_ERROR = 0.04  # of a run's mean over all places of a band; the rest of ERROR is left to single places
# A judge's difference must also lie outside the t-interval of its two models' own seeds. With two seeds, that interval
# has the first level; benchmarks/judge_errors.py shows why no level gives both few errors and enough verdicts. With
# more seeds, the level is the second number if one of the two models clearly varies more than all others. Otherwise the
# p-value of the test for that, times the third number, is added: up to 23 %.
OWN_ERROR_OF_TWO_SEEDS, OWN_ERROR_OF_SEEDS, OWN_ERROR_BY_P_VALUE = 0.12, 0.03, 0.2
POWER = 0.9
SOUGHT_DEVIATIONS = 3.0  # seed deviations that the default number of seeds finds
_NODES, _CELLS, _REACH = 96, 200, 8.5
# Spectra that a stream of units may have: a first-order autoregression, plus a share of noise that is new in each unit
_CORRELATIONS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.98, 0.99)
_FRESH_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
_LEAST_UNITS, _MOST_UNITS = 8, 1024  # from which a correlation is looked for; more units are summed in groups
_PREFERRED = 4.0  # twice the log-likelihood by which a correlation must beat independence, for its two parameters
_AS_LIKELY = 1.0  # twice the log-likelihood that a more cautious spectrum may lose against the likeliest
_FLAT = 0.65  # share of the power at frequency zero that the chosen frequencies have on average, by the spectrum

Runs = Mapping[int, float]  # values of a recipe's runs, by training seed


@attrs.frozen(kw_only=True)
class Interval:
    value: float
    low: float | None = None  # None, as `high`, where the sample has one unit: its spread is unknown
    high: float | None = None
    error: float | None = None  # standard error, where the bounds are those of Student's t

    def __neg__(self) -> "Interval":
        """Return the interval of b - a, where this one is of a - b."""
        low = None if self.high is None else -self.high
        return Interval(value=-self.value, low=low, high=None if self.low is None else -self.low, error=self.error)

    @property
    def apart(self) -> bool:
        """Tell whether zero lies outside: a difference is significant."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    def widened(self, reach: float, error: float | None = None) -> "Interval":
        """Return the interval with an independent error, which alone would reach so far on both sides.

        If both standard errors are known, it is Student's interval of their sum, at the mean of the two critical
        values, weighted by the squares of the errors (Cochran, Biometrics 20, 1964). A small error of which few degrees
        of freedom are known then counts little. A false difference has a probability of 5 % at most, or of 6.2 % where
        an error with one degree of freedom is several times as large as the other one. If an error is not known, the
        squares of the reaches are added, which is wider.
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
        """Return what is stored of an interval."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def text(self, digits: int, sign: str = "") -> str:
        """Return the value and, where known, the bounds in brackets. `sign`: "+" to show it."""
        value = f"{self.value:{sign}.{digits}f}"
        if self.low is None or self.high is None:
            return value
        return f"{value} [{self.low:{sign}.{digits}f}, {self.high:{sign}.{digits}f}]"


@attrs.frozen(kw_only=True)
class SeedNoise:
    """Standard errors of a difference of two recipes over training seeds."""

    pooled: float  # over all recipes
    freedom: float  # degrees of freedom; infinite where the user stated the deviation
    own: float = 0.0  # of the runs of the two alone
    own_freedom: float = 1.0

    def reach(self, comparisons: int, critical: float | None = None) -> float:
        """Return the half width of one of several comparisons; `critical`: of the pooled error, else Bonferroni's."""
        return max(self._reaches(comparisons, critical))

    def added_to(self, difference: Interval, comparisons: int) -> Interval:
        """Return the interval of one of several differences, over its own error and this noise together.

        It is the wider one of those with the pooled error and with the error of the two recipes' own runs. Each of them
        grows with the number of comparisons, so the wider one does, too.
        """
        pooled, own = self._reaches(comparisons, None)
        both = [difference.widened(pooled, self.pooled), difference.widened(own, self.own)]
        return max(both, key=lambda one: 0.0 if one.low is None or one.high is None else one.high - one.low)

    def _reaches(self, comparisons: int, critical: float | None) -> tuple[float, float]:
        """Return the half widths of one of several comparisons: by the pooled error, and by the recipes' own runs."""
        if critical is None:
            critical = student_quantile(1 - ERROR / comparisons / 2, self.freedom)
        return critical * self.pooled, own_quantile(comparisons, self.own_freedom) * self.own


def plus_minus(value: float, error: float | None, digits: int) -> str:
    text = f"{round(value, digits) + 0.0:.{digits}f}"  # -0.04 is 0.0, not -0.0
    return text if error is None else f"{text} ± {error:.{digits}f}"


def student_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t with `freedom` degrees of freedom, above zero; infinite: the normal's."""
    if math.isinf(freedom):
        return NormalDist().inv_cdf(probability)
    return float(special.stdtrit(freedom, probability))


def student_interval(value: float, error: float | None, freedom: float, confidence: float = CONFIDENCE) -> Interval:
    """Return the interval of a value with that standard error; None: no bounds."""
    if error is None:
        return Interval(value=value)
    reach = student_quantile((1 + confidence) / 2, freedom) * error
    return Interval(value=value, low=value - reach, high=value + reach, error=error)


def mean_and_error(values: np.ndarray, sizes: np.ndarray | None = None) -> tuple[float, float | None]:
    """Return the mean and its standard error, None of one unit; with `sizes`, the ratio of the sums.

    A mean over tokens is a ratio over documents, the units that were sampled: tokens of one are correlated (Cochran,
    Sampling Techniques, 3rd ed. 1977, section 2.11). Of differences of two models' values, the error is paired.
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
    """Return the standard error of a mean over items, each of which was hit or missed; None of one item.

    `step`: how much the value of a hit is above that of a miss. `paired`: values are differences of two models, which
    are 0 where both hit or both miss. Where all items are hit, or all missed, or the models never differ, the plain
    error is 0, and says that another sample could not have differed. So the error is at least that of two items more:
    one hit and one miss (Agresti and Coull, American Statistician 52, 1998), or, if paired, one item on which the
    models differ, half in each direction, and one on which they do not (Agresti and Min, Statistics in Medicine 24,
    2005).
    """
    error, number = mean_and_error(values)[1], len(values) + 2
    if error is None:
        return None
    low = float(values.min())
    more, more_squares = (0.0, step**2) if paired else (2 * low + step, low**2 + (low + step) ** 2)
    mean = (float(values.sum()) + more) / number
    variance = (float(np.square(values).sum()) + more_squares) / number - mean**2
    return max(error, math.sqrt(max(0.0, variance) / number))


@attrs.frozen(kw_only=True)
class StreamMean:
    """The mean of a stream of units, of which neighbours may be alike."""

    value: float
    error: float | None  # standard error; None of one unit
    freedom: float  # degrees of freedom of the error
    independent: float  # number of independent units that would give this error; that of all, where none are alike

    def error_for(self, freedom: float) -> float | None:
        """Return the error that gives the same 95 % interval where a reader assumes other degrees of freedom."""
        if self.error is None:
            return None
        at = (1 + CONFIDENCE) / 2
        return self.error * student_quantile(at, self.freedom) / student_quantile(at, freedom)


def stream_mean(values: np.ndarray, sizes: np.ndarray) -> StreamMean:
    """Return the ratio of the sums of units in the order of their stream, with an error that counts their correlation.

    Neighbouring documents of a corpus are often alike, and an error that takes them as independent is then too small:
    by half or more. Their deviations are transformed to frequencies (cosines), where independent units have the same
    power everywhere. If a spectrum of correlated units explains the powers better (by Whittle's likelihood), the
    variance is the mean power of the lowest frequencies alone, corrected by that spectrum for what they miss of the
    power at zero, with a degree of freedom for each of them (Mueller, Journal of Econometrics 141, 2007; Lazarus et
    al., Journal of Business and Economic Statistics 36, 2018). Otherwise it is the error of `mean_and_error`. What this
    cannot see: correlation over more units than the stream has. benchmarks/document_errors.py measures the coverage.
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
    grouped = math.sqrt(variance * len(deviations)) / float(sizes.sum())
    if frequencies == len(powers):
        return independent if number <= _MOST_UNITS else attrs.evolve(independent, error=grouped)
    worth = number * (error / grouped) ** 2 if grouped else float(number)
    return StreamMean(
        value=mean, error=grouped, freedom=min(freedom, frequencies), independent=max(1.0, min(number, worth))
    )


def _power_at_zero(powers: np.ndarray) -> tuple[int, float]:
    """Return how many of the lowest frequencies tell the power at frequency zero, and that power."""
    shapes, logarithms, flatness = _spectra(len(powers))
    likelihood = -0.5 * (logarithms + len(powers) * np.log(shapes @ powers / len(powers)))
    behind = 2 * (likelihood.max() - likelihood)  # of each spectrum; the first is that of independent units
    if behind[0] < _PREFERRED:
        return len(powers), float(powers.mean())
    likely = np.flatnonzero(behind <= _AS_LIKELY)
    counts = np.maximum(1, (flatness[likely] >= _FLAT).sum(axis=1))
    chosen = int(counts.argmin())
    count = int(counts[chosen])
    return count, float(powers[:count].mean() / flatness[likely[chosen], count - 1])


@lru_cache(maxsize=8)
def _spectra(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the spectra at so many frequencies above zero, independent units first.

    The inverse of each (spectra, frequencies), the sum of its logarithms (spectra,), and the mean of its lowest 1, 2,
    ... frequencies as a share of its power at zero (spectra, frequencies).
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
    """Return bounds, both (M,), that hold all M values of one more run together; `values`: of R runs (R, M).

    Student's interval of one further observation (Hahn and Meeker, Statistical Intervals, 1991, section 4.7) with
    Bonferroni's level. The variance is that of all M places, or of those up to `apart` away where they scatter more;
    values `apart` places from each other are taken to share no noise. What a run keeps from its first place to its last
    is shared by all of them, and only R - 1 degrees of freedom are known of it. So the band is never narrower than
    Student's interval of a further run's mean over the places. benchmarks/band_errors.py measures both together.
    """
    runs, number = values.shape
    variances, mean = values.var(axis=0, ddof=1), values.mean(axis=0)
    near = []
    for place in range(number):
        reach = min(apart, place + 1)  # the first values are means over fewer steps, and scatter more than the next
        near.append(variances[max(0, place - reach) : place + reach + 1].mean())
    critical = student_quantile(1 - ERROR / number / 2, (runs - 1) * number / apart)
    of_runs = student_quantile(1 - BAND_ERROR / 2, runs - 1) * values.mean(axis=1).std(ddof=1)
    half = np.maximum(critical * np.sqrt(np.maximum(near, variances.mean())), of_runs) * math.sqrt(1 + 1 / runs)
    return mean - half, mean + half


def ratio_freedom(sizes: np.ndarray) -> float:
    """Return the degrees of freedom of a mean over units of these sizes (Kish, Survey Sampling, 1965), one at least."""
    return max(1.0, float(sizes.sum()) ** 2 / float(np.square(sizes).sum()) - 1)


def combined_error(*parts: tuple[float, float]) -> tuple[float, float]:
    """Return the error and freedom of a sum of independent ones (Satterthwaite, Biometrics Bulletin 2, 1946)."""
    variance = math.fsum(error**2 for error, _ in parts)
    spread = math.fsum(error**4 / freedom for error, freedom in parts)
    return math.sqrt(variance), variance**2 / spread if spread else math.inf


def residual_deviation(recipes: Sequence[Runs], *, paired: bool) -> tuple[float, int]:
    """Return the deviation of a run over seeds, and its freedom; `paired`: less what a seed does to all recipes."""
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


def shared_seeds(one: Runs, other: Runs) -> list[int]:
    """Return the seeds by which two recipes are paired; none where they share fewer than two."""
    seeds = sorted(one.keys() & other.keys())
    return seeds if len(seeds) > 1 else []


def seed_noise(
    recipes: Sequence[Runs], one: Runs, other: Runs, stated_deviation: float | None = None
) -> SeedNoise | None:
    """Return the noise of two recipes' difference, paired where they share seeds; None where one has a single one."""
    seeds = shared_seeds(one, other)
    scale = math.sqrt(2 / len(seeds) if seeds else 1 / len(one) + 1 / len(other))
    if stated_deviation is not None:
        return SeedNoise(pooled=stated_deviation * scale, freedom=math.inf)
    if min(len(one), len(other)) < 2:
        return None
    values = [[one[seed] - other[seed] for seed in seeds]] if seeds else [[*one.values()], [*other.values()]]
    own, own_freedom = combined_error(*((mean_and_error(np.array(each))[1] or 0.0, len(each) - 1) for each in values))
    deviation, freedom = residual_deviation(recipes, paired=bool(seeds))
    return SeedNoise(pooled=deviation * scale, freedom=freedom, own=own, own_freedom=own_freedom)


def own_quantile(comparisons: int, freedom: float) -> float:
    return student_quantile(1 - ERROR / comparisons**OWN_EXPONENT / 2, freedom)


@cache
def dunnett_quantile(comparisons: int, freedom: float) -> float:
    """Return the two-sided critical value of so many differences from one base, with equal numbers of seeds.

    Dunnett (1955, JASA 50, 1096) bounds the largest of k statistics that share the base and one pooled error, knowing
    their correlation of 1/2. P(max |T| <= c) = E over s and z of [Phi(sqrt(2) c s + z) - Phi(-sqrt(2) c s + z)] ** k,
    with z normal and s ** 2 chi-squared over its degrees of freedom, by Gauss-Legendre quadrature: scipy's
    multivariate_t integrates k dimensions at random.
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
    """Return the probability to find one difference of `shift` standard errors from a base, at equal variances."""
    own, pooled = own_quantile(comparisons, seeds - 1), dunnett_quantile(comparisons, comparisons * (seeds - 1))
    first = (np.arange(_CELLS) + 0.5) / _CELLS
    freedom, rest = seeds - 1, (comparisons - 1) * (seeds - 1)
    own_squares = special.chdtri(freedom, 1 - first)[:, None]
    rest_squares = special.chdtri(rest, 1 - first)[None, :] if rest else np.zeros((1, 1))
    reach = np.maximum(
        own * np.sqrt(own_squares / freedom), pooled * np.sqrt((own_squares + rest_squares) / (freedom + rest))
    )
    return float(np.mean(special.ndtr(shift - reach) + special.ndtr(-shift - reach)))


@cache
def detectable_deviations(comparisons: int, seeds: int) -> float:
    """Return the difference that is found with the probability POWER, in seed deviations: of one run over seeds."""
    return least_found(lambda shift: power(shift, comparisons, seeds)) * math.sqrt(2 / seeds)


def least_found(probability: Callable[[float], float]) -> float:
    """Return the shift above 0 that is found with the probability POWER; `probability` rises with the shift."""
    most = 1.0
    while probability(most) < POWER:
        most *= 2
    return float(optimize.brentq(lambda shift: probability(shift) - POWER, 0.0, most, xtol=1e-6))


def default_seeds(comparisons: int) -> int:
    """Return the fewest seeds that find a difference of SOUGHT_DEVIATIONS."""
    return next(seeds for seeds in range(2, 100) if detectable_deviations(comparisons, seeds) <= SOUGHT_DEVIATIONS)


def two_way_intervals(scores: np.ndarray) -> tuple[list[Interval], dict[tuple[int, int], Interval]]:
    """Return each model's mean score, and the differences a - b of models a < b, with 95 % intervals.

    `scores`: float64 (M models, S fine-tuning seeds, Q questions), NaN where a question was not judged, for all models
    alike, else ValueError. Questions are paired; seeds are not, and their variance is pooled over models, but no
    interval is narrower than the t-interval of its own models' seeds, at a level that depends on whether they scatter
    more than the others (`_own_error`). With two seeds that guard is weak: their intervals assume that the seeds of all
    models scatter alike. The noise of single answers is counted in both errors: intervals are conservative. Of one seed
    they cover questions only, and do not say which model is better. Intervals of differences are simultaneous
    (Bonferroni).
    """
    judged = ~np.isnan(scores)
    if (judged != judged[0]).any() or not judged.any():
        raise ValueError("scores: wanted at least one judged question, and the same ones judged for all models")
    scores = scores[:, judged[0].any(1)][:, :, judged[0].any(0)]
    models, seeds, questions = scores.shape
    counts = (~np.isnan(scores[0])).sum(0)
    sums = np.nansum(scores, axis=1)  # (M, Q)
    freedom = models * (seeds - 1)
    # Of a model's mean over seeds (M,)
    variances = np.nanmean(scores, axis=2).var(axis=1, ddof=1) / seeds if freedom else np.zeros(models)
    pooled = float(variances.mean())

    def interval(of_questions: np.ndarray, sides: tuple[int, ...], confidence: float) -> Interval:
        value, error = mean_and_error(of_questions, counts)
        found = student_interval(value, error, questions - 1, confidence)
        if not freedom:
            return found
        of_all = student_quantile((1 + confidence) / 2, freedom) * math.sqrt(len(sides) * pooled)
        own, own_freedom = combined_error(*((math.sqrt(variances[model]), seeds - 1) for model in sides))
        critical = student_quantile(1 - _own_error(variances, sides, seeds) / 2, own_freedom)
        return found.widened(max(of_all, critical * own))

    pairs = list(combinations(range(models), 2))
    simultaneous = 1 - ERROR / max(1, len(pairs))
    means = [interval(sums[model], (model,), CONFIDENCE) for model in range(models)]
    return means, {(a, b): interval(sums[a] - sums[b], (a, b), simultaneous) for a, b in pairs}


def _own_error(variances: np.ndarray, sides: tuple[int, ...], seeds: int) -> float:
    """Return the level of the t-interval of one or two models' own seeds.

    The F-test compares the larger variance of `sides` with the mean of all other models' variances, `variances` (M,).
    The larger its p-value, the less reason there is to doubt the pooled variance, and the narrower the interval of the
    models' own seeds may be.
    """
    if seeds == 2:
        return OWN_ERROR_OF_TWO_SEEDS
    widest = max(sides, key=lambda model: float(variances[model]))
    others = np.delete(variances, widest)
    if not others.any():
        return OWN_ERROR_OF_SEEDS
    p_value = special.fdtrc(seeds - 1, (seeds - 1) * len(others), variances[widest] / others.mean())
    return OWN_ERROR_OF_SEEDS + OWN_ERROR_BY_P_VALUE * float(p_value)
