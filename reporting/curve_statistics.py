"""Statistics of curves: the moving average, and the top of a range that outliers do not stretch."""

from collections.abc import Sequence

import numpy as np

from reporting.run_history import Curve

AVERAGED_SHARE = 0.02  # width of the moving average, as a share of the known values
EARLY_SHARE = 0.05  # of a run: losses of its first steps may lie above the chart
ORDINARY_SHARE = 0.98  # of the values; a higher one is a spike where it is far above them all
FEWEST_VALUES = 10  # among which one is called a spike
SPIKE_RANGES = 3.0  # of the ordinary values, from the least one to a spike
SPIKE_FACTOR = 2.0  # between the largest ordinary value and a spike, or what is shown of an outlying run
OUTLYING_FACTOR = 5.0  # between the tops of an ordinary run and of one that lies outside
BEARABLE_RANGES = 1.5  # of the values below the top: higher ones that reach no farther are shown as well


def smoothed(curve: Curve) -> np.ndarray:
    """Return the moving average of the known values around each, NaN at the others; at the ends over what is there."""
    known = np.isfinite(curve.values)
    count = int(known.sum())
    reach = max(1, round(count * AVERAGED_SHARE / 2))
    first = np.maximum(np.arange(count) - reach, 0)
    after = np.minimum(np.arange(count) + reach + 1, count)
    sums = np.concatenate([[0.0], np.cumsum(curve.values[known])])
    values = np.full(len(curve.values), np.nan)
    values[known] = (sums[after] - sums[first]) / (after - first)
    return values


def common_top(curves: Sequence[Curve], *, losses: bool, runs: bool) -> float | None:
    """Return the largest value to show of curves in one chart; None to show all of them.

    `losses`: high values of the first steps are left out. `runs`: and a run that is far above most others.
    """
    tops = sorted(_top(curve, EARLY_SHARE if losses else 0.0) for curve in curves)
    if not tops:
        return None
    joined = np.concatenate([_known(curve) for curve in curves])
    ordinary = tops[(len(tops) - 1) // 2]
    top = tops[-1]
    if runs and top > max(ordinary, OUTLYING_FACTOR * ordinary):
        near = joined[joined <= max(ordinary, SPIKE_FACTOR * ordinary)]  # where the outlying run leaves the chart
        top = max(float(near.max()), *(one for one in tops if one <= OUTLYING_FACTOR * ordinary))
    low = min(float(joined.min()), top)
    return None if joined.max() <= low + BEARABLE_RANGES * (top - low) else top


def _top(curve: Curve, early_share: float) -> float:
    """Return the largest value of a curve that is no spike."""
    later = curve.values[(curve.steps >= early_share * curve.steps[-1]) & np.isfinite(curve.values)]
    values = later if len(later) else _known(curve)
    if len(values) < FEWEST_VALUES:
        return float(values.max())
    low, ordinary = float(values.min()), float(np.quantile(values, ORDINARY_SHARE, method="lower"))
    limit = max(low + SPIKE_RANGES * (ordinary - low), SPIKE_FACTOR * ordinary)
    return float(values[values <= limit].max())


def _known(curve: Curve) -> np.ndarray:
    return curve.values[np.isfinite(curve.values)]
