"""Scale of an axis: its labels are few, round and inside the chart, whatever its values."""

import numpy as np
import pytest

from common.chart_scale import tick_labels, ticks, value_range


@pytest.mark.parametrize(
    ("values", "wanted"), [([], (0, 1)), ([0.0], (0, 1)), ([np.nan, 2.0], (1.8, 2.2)), ([3.0, 1.0], (1, 3))]
)
def test_a_range_has_two_different_ends(values: list[float], wanted: tuple[float, float]) -> None:
    assert value_range([np.array(values)]) == pytest.approx(wanted)


@pytest.mark.parametrize(("low", "high"), [(1.05, 1.45), (0.9, 30), (1e-6, 1e30), (2, 2.5)])
def test_a_logarithmic_axis_has_some_labels_and_not_too_many(low: float, high: float) -> None:
    assert 2 <= len(ticks(low, high, logarithmic=True)) <= 12


def test_the_last_label_of_an_x_axis_ends_at_its_place() -> None:
    labels = tick_labels([(0.0, "0"), (50.0, "50"), (99.0, "99")], lambda value: value / 100, "left")
    assert labels.count("<span") == 3 and '<span class=last style="left:99.00%">99' in labels
