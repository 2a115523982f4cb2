"""The cost of a checkpoint counts every launch at its own price."""

from typing import Any

from evaluation.shared.run_cost import RunCost, seconds_by_price

HOUR = 3600.0


def launch(price: float | None, *hours: float) -> list[dict[str, Any]]:
    """Return the records of a launch that ran until so many hours of the run."""
    return [
        {"event": "start", "step": 0, "price_per_hour": price},
        *({"step": 1, "train_loss": 1.0, "elapsed_seconds": hour * HOUR} for hour in hours),
    ]


def test_launches_at_several_prices_are_summed() -> None:
    records = [*launch(2.0, 0.5, 1.0), *launch(None, 1.5), *launch(3.0, 2.0, 4.0)]
    assert seconds_by_price(records, 3 * HOUR, 9.0) == {2.0: HOUR, None: 0.5 * HOUR, 3.0: 1.5 * HOUR}
    assert seconds_by_price(records, 1 * HOUR, 9.0) == {2.0: HOUR}  # a checkpoint before the price changed
    assert seconds_by_price(records, 5 * HOUR, 9.0)[3.0] == 3.5 * HOUR  # saved after the last record


def test_launches_before_prices_were_recorded_cost_the_runs_price() -> None:
    older = [{"event": "start", "step": 0}, {"step": 1, "train_loss": 1.0, "elapsed_seconds": HOUR}]
    assert seconds_by_price(older, HOUR, 9.0) == {9.0: HOUR}
    assert seconds_by_price([], HOUR, 9.0) == {9.0: HOUR}


def test_what_was_lost_with_a_kill_is_paid_for_once() -> None:
    records = [*launch(2.0, 1.0), *launch(3.0, 0.5, 2.0)]  # the second launch repeats half an hour of records
    assert seconds_by_price(records, 2 * HOUR, None) == {2.0: HOUR, 3.0: HOUR}


def test_the_cost_names_its_prices_and_hours_without_one() -> None:
    cost = RunCost(tokens=1, hours=3.5, hours_by_price={2.0: 1.0, None: 0.5, 3.0: 2.0})
    assert (cost.dollars, str(cost)) == (8.0, "$8.00 at $2.00 and $3.00 an hour, and 0.50 hours without a stated price")
    assert str(RunCost(tokens=1, hours=1, hours_by_price={3.29: 1.0})) == "$3.29 at $3.29 an hour"
    assert RunCost(tokens=1, hours=1, hours_by_price={None: 1.0}).dollars is None
