"""Measurements as text and as bounds."""

import pytest

from evaluation.shared.results import EvaluationResult, Measure, Measurement
from evaluation.shared.significance import Interval

LOSS = Measure(name="loss", digits=2)


def test_a_measurement_is_told_with_its_error_its_interval_or_alone() -> None:
    alone = Measurement(measure=LOSS, value=1.234)
    error = Measurement(measure=LOSS, value=1.234, error=0.5, freedom=2)
    interval = Measurement(measure=LOSS, value=1.234, interval=Interval(value=1.234, low=1, high=2))
    assert [alone.text, error.text, interval.text] == ["1.23", "1.23 ± 0.50", "1.23 [1.00, 2.00]"]
    assert [alone.bounds, interval.bounds] == [None, (1, 2)]
    assert error.bounds == pytest.approx((1.234 - 2.151, 1.234 + 2.151), abs=1e-3)  # Student's t
    assert Measurement(measure=LOSS, value=1, interval=Interval(value=1)).bounds is None


def test_a_result_finds_a_measure_by_its_value() -> None:
    measurement = Measurement(measure=Measure(name="loss", digits=2), value=1)
    result = EvaluationResult(
        evaluation="loss", model="m", time="t", subject="s", description="", measurements=[measurement]
    )
    assert result.measurement(LOSS) == measurement
    assert result.measurement(Measure(name="other")) is None
