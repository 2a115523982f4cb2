"""Cost of training a checkpoint: tokens, wall-clock hours, and dollars with each job at its own price."""

from collections.abc import Sequence
from typing import Any

import attrs

from evaluation.shared.load import ModelLocation
from training.state import Position
from training.telemetry.metrics_log import is_price, last_price, priced_seconds, read_lines


@attrs.frozen(kw_only=True)
class RunCost:
    """Cost of a run up to one of its checkpoints."""

    tokens: int
    hours: float  # wall clock
    hours_by_price: dict[float | None, float]  # price of the machine, USD per hour; None: of a run without prices

    @property
    def dollars(self) -> float | None:
        """Cost of all hours; None where no price is known."""
        priced = [price * hours for price, hours in self.hours_by_price.items() if price is not None]
        return sum(priced) if priced else None

    def __str__(self) -> str:
        prices = [f"${price:,.2f}" for price in self.hours_by_price if price is not None]
        return f"${self.dollars or 0:,.2f} at {' and '.join(prices)} an hour"


def cost_of(place: ModelLocation, position: Position) -> RunCost:
    """Return the cost of a run up to the position of a checkpoint."""
    records = [] if place.run is None else read_lines(place.run)
    price = place.record.get("price_per_hour")
    seconds = seconds_by_price(records, position.elapsed_seconds, price if is_price(price) else None)
    return RunCost(
        tokens=position.tokens,
        hours=position.elapsed_seconds / 3600,
        hours_by_price={price: value / 3600 for price, value in seconds.items()},
    )


def seconds_by_price(
    lines: Sequence[dict[str, Any]], elapsed_seconds: float, price: float | None
) -> dict[float | None, float]:
    """Return how many of a run's first seconds cost each price per hour. `price`: where no job has recorded one."""
    seconds: dict[float | None, float] = {}
    counted, paid = 0.0, last_price(lines, price)
    for reached, paid in priced_seconds(lines, price):
        before, counted = counted, min(reached, elapsed_seconds)
        seconds[paid] = seconds.get(paid, 0.0) + counted - before
    seconds[paid] = seconds.get(paid, 0.0) + elapsed_seconds - counted  # saved after the last line
    return {price: value for price, value in seconds.items() if value > 0}
