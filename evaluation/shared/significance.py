"""Confidence intervals: Student's t, and the standard error of a ratio of sums over documents."""

import math
from statistics import NormalDist

import attrs
import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95
NORMAL_95 = 1.96  # standard errors on each side of a 95 % interval


@attrs.frozen(kw_only=True)
class Interval:
    """A value, and the bounds of its confidence interval."""

    value: float
    low: float | None = None  # None, as `high`, where the sample has one unit: its spread is unknown
    high: float | None = None

    def __neg__(self) -> "Interval":
        """Return the interval of b - a, where this one is of a - b."""
        low = None if self.high is None else -self.high
        return Interval(value=-self.value, low=low, high=None if self.low is None else -self.low)

    @property
    def apart(self) -> bool:
        """Tell whether zero lies outside: a difference is significant."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    def text(self, digits: int, sign: str = "") -> str:
        """Return the value and, where known, the bounds in brackets. `sign`: "+" to show it."""
        value = f"{self.value:{sign}.{digits}f}"
        if self.low is None or self.high is None:
            return value
        return f"{value} [{self.low:{sign}.{digits}f}, {self.high:{sign}.{digits}f}]"


def plus_minus(value: float, error: float | None, digits: int, *, signed: bool = False) -> str:
    """Return a value and, where known, its standard error as text."""
    value = round(value, digits) + 0.0  # -0.04 is 0.0, not -0.0
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"


def student_interval(value: float, error: float | None, units: int, confidence: float) -> Interval:
    """Return the interval of a mean over independent units with that standard error; None: no bounds."""
    if error is None:
        return Interval(value=value)
    reach = student_quantile((1 + confidence) / 2, units - 1) * error
    return Interval(value=value, low=value - reach, high=value + reach)


def student_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t with `freedom` degrees of freedom, at least one; infinite: the normal's."""
    if math.isinf(freedom):
        return NormalDist().inv_cdf(probability)
    return float(stdtrit(freedom, probability))


def ratio(values: np.ndarray, sizes: np.ndarray) -> tuple[float, float | None]:
    """Return the sum of values over the sum of sizes, and its standard error where there are two units or more.

    A mean over tokens is such a ratio over documents, the units that were sampled: tokens of one document are
    correlated (Cochran, Sampling Techniques, 3rd ed. 1977, section 2.11). Given differences of two models' values, it
    is the difference of their ratios with its paired error.
    """
    total = float(sizes.sum())
    mean = float(values.sum()) / total
    number = len(values)
    if number < 2:
        return mean, None
    squares = float(np.square(values - mean * sizes).sum())
    return mean, math.sqrt(squares * number / (number - 1)) / total
