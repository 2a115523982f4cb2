"""The cost of a checkpoint counts every job at its own price, or at that of the last job that has one."""

from typing import Any

import pytest

from evaluation.shared.results import RunCost, seconds_by_price
from reporting.run_history import clock

HOUR = 3600.0


def launch(price: float | None, *hours: float) -> list[dict[str, Any]]:
    """Return the records of a launch that ran until so many hours of the run."""
    return [
        {"event": "start", "step": 0, "price_per_hour": price},
        *({"step": 1, "train_loss": 1.0, "elapsed_seconds": hour * HOUR} for hour in hours),
    ]


def test_launches_at_several_prices_are_summed() -> None:
    records = [*launch(2.0, 0.5, 1.0), *launch(None, 1.5), *launch(3.0, 2.0, 4.0)]
    assert seconds_by_price(records, 3 * HOUR, 9.0) == {2.0: HOUR, 3.0: 2 * HOUR}
    assert seconds_by_price(records, 1 * HOUR, 9.0) == {2.0: HOUR}  # a checkpoint before the price changed
    assert seconds_by_price(records, 5 * HOUR, 9.0)[3.0] == 4 * HOUR  # saved after the last record


def test_the_report_and_the_comparison_count_the_same_dollars() -> None:
    records = [*launch(None, 1.0), *launch(2.0, 1.5), *launch(None, 3.0), *launch(4.0, 3.5), *launch(None, 5.0)]
    for lines, stated in ((records, 9.0), (launch(None, 5.0), 9.0)):
        hours = {price: seconds / HOUR for price, seconds in seconds_by_price(lines, 5 * HOUR, stated).items()}
        usd = clock(lines, stated)[1]
        assert usd is not None and RunCost(tokens=1, hours=5, hours_by_price=hours).dollars == pytest.approx(usd[-1])
    assert seconds_by_price(records, 5 * HOUR, 9.0) == {4.0: 4.5 * HOUR, 2.0: 0.5 * HOUR}


def test_launches_before_prices_were_recorded_cost_the_runs_price() -> None:
    older = [{"event": "start", "step": 0}, {"step": 1, "train_loss": 1.0, "elapsed_seconds": HOUR}]
    assert seconds_by_price(older, HOUR, 9.0) == {9.0: HOUR}
    assert seconds_by_price([], HOUR, 9.0) == {9.0: HOUR}


def test_what_was_lost_with_a_kill_is_paid_for_once() -> None:
    records = [*launch(2.0, 1.0), *launch(3.0, 0.5, 2.0)]  # the second launch repeats half an hour of records
    assert seconds_by_price(records, 2 * HOUR, None) == {2.0: HOUR, 3.0: HOUR}


def test_the_cost_names_its_prices() -> None:
    cost = RunCost(tokens=1, hours=3.0, hours_by_price={2.0: 1.0, 3.0: 2.0})
    assert (cost.dollars, str(cost)) == (8.0, "$8.00 at $2.00 and $3.00 an hour")
    assert str(RunCost(tokens=1, hours=1, hours_by_price={3.29: 1.0})) == "$3.29 at $3.29 an hour"
    assert RunCost(tokens=1, hours=1, hours_by_price={None: 1.0}).dollars is None
