"""Intervals and standard errors."""

import attrs
import numpy as np
import pytest

from evaluation.shared.significance import Interval, plus_minus, ratio, student_interval, student_quantile


def test_turned_round_an_interval_says_the_same_of_the_other() -> None:
    found = Interval(value=2, low=-1, high=5)
    assert -found == Interval(value=-2, low=-5, high=1)
    assert not found.apart and Interval(value=2, low=1, high=3).apart and Interval(value=-2, low=-3, high=-1).apart
    unknown = Interval(value=2, low=None, high=None)
    assert not unknown.apart and -unknown == attrs.evolve(unknown, value=-2)


def test_quantiles_are_students() -> None:  # of a table
    for freedom, quantile in ((1, 12.706), (2, 4.303), (10, 2.228), (109, 1.982)):
        assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-4)


def test_a_ratio_over_units_of_one_size_has_the_error_of_a_mean() -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0])
    mean, error = ratio(values * 10, np.full(4, 10.0))
    assert (mean, error) == (4.0, pytest.approx(values.std(ddof=1) / 2))
    assert ratio(values[:1], np.ones(1)) == (1.0, None)


def test_an_interval_of_a_mean_is_students() -> None:
    found = student_interval(2.0, 0.5, 11, 0.95)
    assert [found.low, found.high] == pytest.approx([2 - 2.228 * 0.5, 2 + 2.228 * 0.5], abs=1e-3)
    assert student_interval(2.0, None, 1, 0.95) == Interval(value=2.0)


def test_values_are_told_with_their_errors_and_without_a_negative_zero() -> None:
    assert plus_minus(-0.04, None, 1) == "0.0"
    assert plus_minus(0.26, 0.14, 1, signed=True) == "+0.3 ± 0.1"
    assert Interval(value=1, low=0.5, high=2).text(1) == "1.0 [0.5, 2.0]"
    assert Interval(value=1).text(2) == "1.00"
