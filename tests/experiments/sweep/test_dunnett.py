"""Critical values against published tables, and the power that they leave."""

import numpy as np
import pytest
from scipy.stats import multivariate_t

from evaluation.shared.significance import student_quantile
from experiments.sweep.dunnett import (
    POWER,
    SOUGHT_DEVIATIONS,
    default_seeds,
    detectable_deviations,
    detectable_errors,
    dunnett_quantile,
    power,
)


@pytest.mark.parametrize(("comparisons", "freedom"), [(2, 4), (3, 20), (5, 10), (9, 60)])
def test_critical_values_hold_95_percent_of_the_multivariate_t(comparisons: int, freedom: int) -> None:
    shape = np.full((comparisons, comparisons), 0.5) + 0.5 * np.eye(comparisons)
    reach = np.full(comparisons, dunnett_quantile(comparisons, freedom))
    inside = multivariate_t.cdf(reach, shape=shape, df=freedom, lower_limit=-reach, maxpts=200_000, random_state=0)
    assert inside == pytest.approx(0.95, abs=5e-4)


def test_hundreds_of_variants_have_a_default_number_of_seeds() -> None:
    assert 8 <= default_seeds(999) <= 15


def test_one_comparison_is_a_paired_t_test() -> None:
    assert dunnett_quantile(1, 4) == pytest.approx(student_quantile(0.975, 4), rel=1e-4)


def test_the_detectable_difference_is_found_with_the_stated_power() -> None:
    assert power(detectable_errors(2, 4), 2, 4) == pytest.approx(POWER, abs=1e-5)
    assert power(0.0, 2, 4) < 0.05


@pytest.mark.parametrize("comparisons", [1, 2, 5])
def test_the_default_seeds_find_three_deviations_and_one_fewer_does_not(comparisons: int) -> None:
    seeds = default_seeds(comparisons)
    assert detectable_deviations(comparisons, seeds) <= SOUGHT_DEVIATIONS
    assert detectable_deviations(comparisons, seeds - 1) > SOUGHT_DEVIATIONS
