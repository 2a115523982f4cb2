"""Statistics of curves: the top of a chart follows most values, and the average is one of known values."""

import numpy as np

from reporting.curve_statistics import common_top, smoothed
from reporting.run_history import Curve

STEPS = np.arange(1, 100_001, dtype=float)
FALLING = 2 + 3 * np.exp(-STEPS / 20_000)


def curve(values: np.ndarray) -> Curve:
    return Curve(STEPS[: len(values)], values)


def test_one_spike_does_not_flatten_a_long_curve() -> None:
    spiked = FALLING.copy()
    spiked[60_000] = 30.0
    top = common_top([curve(spiked)], losses=True, runs=False)
    assert top is not None and 4 < top < 5
    assert common_top([curve(FALLING)], losses=True, runs=False) is None


def test_high_losses_of_the_first_steps_do_not_flatten_the_others() -> None:
    early = np.where(STEPS < 1000, 11.0, FALLING)
    top = common_top([curve(early)], losses=True, runs=False)
    assert top is not None and 4 < top < 5
    assert common_top([curve(FALLING[::-1])], losses=True, runs=False) is None


def test_one_bad_run_does_not_flatten_the_others_and_another_tokenizer_is_no_bad_run() -> None:
    bad = curve(np.array([5.0, 36_000.0]))
    top = common_top([curve(FALLING), bad], losses=True, runs=True)
    assert top is not None and top < 6
    assert common_top([curve(FALLING), curve(3 * FALLING)], losses=True, runs=True) is None
    assert common_top([bad], losses=True, runs=True) is None
    begins_well = curve(np.array([5.5] * 50 + [36_000.0] * 50))
    assert common_top([curve(FALLING), begins_well], losses=True, runs=True) == 5.5


def test_a_moving_average_leaves_gaps_out() -> None:
    values = smoothed(curve(np.array([1.0, np.nan, 3.0, 5.0])))
    assert np.isnan(values[1]) and values[[0, 2, 3]].tolist() == [2.0, 3.0, 4.0]
