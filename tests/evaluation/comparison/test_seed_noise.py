"""Seed noise is pooled over recipes, and widens the interval of a difference."""

import math
from typing import Any

import pytest

from evaluation.comparison.seed_noise import Group, SeedNoise, pooled_noise, widened
from evaluation.shared.measure import Measure, Measurement
from evaluation.shared.significance import Interval, student_quantile
from tests.evaluation.comparison.stored import result

LOSS = Measure(name="loss", digits=2)


def group(*values: float, **more: Any) -> Group:
    results = [result("loss", [Measurement(measure=LOSS, value=value)]) for value in values]
    return Group(**({"labels": [f"r{value:g}" for value in values], "results": results} | more))


def test_variances_of_recipes_are_pooled_by_their_degrees_of_freedom() -> None:
    noise, note = pooled_noise(LOSS, [group(1, 3), group(5, 5, 8), group(9)])
    assert noise is not None and noise.freedom == 3
    assert noise.deviation == pytest.approx(math.sqrt((2 + 6) / 3))
    assert note == (
        "Seed noise, loss: r1, r3 (2 seeds) from 1.00 to 3.00; r5, r5, r8 (3 seeds) from 5.00 to 8.00; "
        "standard deviation 1.63, 3 degrees of freedom"
    )


def test_one_seed_of_each_recipe_says_nothing_about_noise() -> None:
    assert pooled_noise(LOSS, [group(1), group(2)]) == (None, None)


def test_an_interval_is_widened_by_the_noise_of_both_means() -> None:
    found = widened(Interval(value=1, low=0.7, high=1.4), SeedNoise(deviation=0.1, freedom=4), (2, 1), 0.95)
    reach = student_quantile(0.975, 4) * 0.1 * math.sqrt(1.5)
    assert [found.low, found.high] == pytest.approx([1 - math.hypot(0.3, reach), 1 + math.hypot(0.4, reach)])
    alone = Interval(value=1)
    assert widened(alone, SeedNoise(deviation=0.1, freedom=4), (1, 1), 0.95) == alone


def test_a_group_of_many_models_is_named_by_some() -> None:
    assert group(1, 2, 3, 4).name == "r1, r2, r3, r4 (4 seeds)"
    assert group(1, 2, 3, 4, 5).name == "r1, r2, r3, 2 more (5 seeds)"
    assert (group(1).name, group(1).verb, group(1, 2).verb) == ("r1", "is", "are")
