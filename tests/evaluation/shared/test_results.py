"""Results are read by model and kind; measurements have a text and bounds; costs depend on the price of each job."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from evaluation.shared.results import (
    Measure,
    Measurement,
    RunCost,
    append_result,
    read_results,
    results_of,
    seconds_by_price,
)
from evaluation.shared.significance import Interval
from reporting.run_history import clock


def test_results_are_selected_by_model_and_kind(tmp_path: Path) -> None:
    for model, kind, value in (("a", "loss", 1), ("b", "loss", 2), ("a", "smoke", 3), ("a", "loss", 4)):
        append_result(tmp_path / "new", model, kind, {"value": value})
    assert [result["value"] for result in results_of(tmp_path / "new", "a", "loss")] == [1, 4]
    assert [result["value"] for result in read_results(tmp_path / "new")] == [1, 2, 3, 4]
    assert read_results(tmp_path / "absent") == []


def test_error_contains_a_result_that_cannot_be_stored(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").mkdir()
    with pytest.raises(BadInput, match=r'cannot be written: .*; the result is \{"evaluation": "loss"'):
        append_result(tmp_path, "a", "loss", {"value": 1})


LOSS = Measure(name="loss", digits=2)


def test_measurement_text_shows_error_or_interval() -> None:
    alone = Measurement(measure=LOSS, value=1.234)
    error = Measurement(measure=LOSS, value=1.234, error=0.5, freedom=2)
    interval = Measurement(measure=LOSS, value=1.234, interval=Interval(value=1.234, low=1, high=2))
    assert [alone.text, error.text, interval.text] == ["1.23", "1.23 ± 0.50", "1.23 [1.00, 2.00]"]
    assert [alone.bounds, interval.bounds] == [None, (1, 2)]
    assert error.bounds == pytest.approx((1.234 - 2.151, 1.234 + 2.151), abs=1e-3)  # Student's t
    assert Measurement(measure=LOSS, value=1, interval=Interval(value=1)).bounds is None


HOUR = 3600.0


def launch(price: float | None, *hours: float) -> list[dict[str, Any]]:
    """Return the records of a job. `hours`: the elapsed time of the run at each record."""
    return [
        {"event": "start", "step": 0, "price_per_hour": price},
        *({"step": 1, "train_loss": 1.0, "elapsed_seconds": hour * HOUR} for hour in hours),
    ]


SEVERAL = [*launch(2.0, 0.5, 1.0), *launch(None, 1.5), *launch(3.0, 2.0, 4.0)]
AGAIN = [*launch(2.0, 1.0), *launch(3.0, 0.5, 2.0)]  # after a kill, the last half hour is repeated
OLDER = [{"event": "start", "step": 0}, {"step": 1, "train_loss": 1.0, "elapsed_seconds": HOUR}]


@pytest.mark.parametrize(
    ("records", "hours", "paid"),
    [
        (SEVERAL, 3, {2.0: 1, 3.0: 2}),
        (SEVERAL, 1, {2.0: 1}),  # a checkpoint that was saved before the price changed
        (SEVERAL, 5, {2.0: 1, 3.0: 4}),  # a checkpoint that was saved after the last record
        *((AGAIN, 2, {2.0: 1, 3.0: 1}), (OLDER, 1, {9.0: 1}), ([], 1, {9.0: 1})),
    ],
)
def test_checkpoint_cost_uses_the_price_of_each_job(
    records: list[dict[str, Any]], hours: float, paid: dict[float, float]
) -> None:
    assert seconds_by_price(records, hours * HOUR, 9.0) == {
        price: price_hours * HOUR for price, price_hours in paid.items()
    }


def test_report_and_comparison_agree_on_dollars() -> None:
    records = [*launch(None, 1.0), *launch(2.0, 1.5), *launch(None, 3.0), *launch(4.0, 3.5), *launch(None, 5.0)]
    for lines, stated in ((records, 9.0), (launch(None, 5.0), 9.0)):
        hours = {price: seconds / HOUR for price, seconds in seconds_by_price(lines, 5 * HOUR, stated).items()}
        usd = clock(lines, stated)[1]
        assert usd is not None and RunCost(tokens=1, hours=5, hours_by_price=hours).dollars == pytest.approx(usd[-1])
    assert seconds_by_price(records, 5 * HOUR, 9.0) == {4.0: 4.5 * HOUR, 2.0: 0.5 * HOUR}


def test_cost_text_names_the_prices() -> None:
    cost = RunCost(tokens=1, hours=3.0, hours_by_price={2.0: 1.0, 3.0: 2.0})
    assert (cost.dollars, str(cost)) == (8.0, "$8.00 at $2.00 and $3.00 an hour")
    assert str(RunCost(tokens=1, hours=1, hours_by_price={3.29: 1.0})) == "$3.29 at $3.29 an hour"
    assert RunCost(tokens=1, hours=1, hours_by_price={None: 1.0}).dollars is None
