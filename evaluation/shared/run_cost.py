"""Cost of training a checkpoint: tokens, wall-clock hours, and dollars with each launch at its own price."""

from collections.abc import Iterable
from typing import Any

import attrs

from evaluation.shared.load import ModelLocation
from training.state import Position
from training.telemetry.metrics_log import read_lines


@attrs.frozen(kw_only=True)
class RunCost:
    """Cost of a run up to one of its checkpoints."""

    tokens: int
    hours: float  # wall clock
    hours_by_price: dict[float | None, float]  # price of the machine, USD per hour; None: not stated

    @property
    def dollars(self) -> float | None:
        """Cost of the hours whose price is known; None where none is."""
        priced = {price: hours for price, hours in self.hours_by_price.items() if price is not None}
        return sum(price * hours for price, hours in priced.items()) if priced else None

    def __str__(self) -> str:
        prices = [f"${price:,.2f}" for price in self.hours_by_price if price is not None]
        unpriced = self.hours_by_price.get(None, 0.0)
        rest = f", and {unpriced:,.2f} hours without a stated price" if unpriced else ""
        return f"${self.dollars or 0:,.2f} at {' and '.join(prices)} an hour{rest}"


def cost_of(place: ModelLocation, position: Position) -> RunCost:
    """Return the cost of a run up to the position of a checkpoint."""
    records = [] if place.run is None else read_lines(place.run)
    seconds = seconds_by_price(records, position.elapsed_seconds, place.record.get("price_per_hour"))
    return RunCost(
        tokens=position.tokens,
        hours=position.elapsed_seconds / 3600,
        hours_by_price={price: value / 3600 for price, value in seconds.items()},
    )


def seconds_by_price(
    records: Iterable[dict[str, Any]], elapsed_seconds: float, price: float | None
) -> dict[float | None, float]:
    """Return how many of a run's first seconds cost each price per hour; None: a price that was not stated.

    `records`: of all launches, as `read_lines` returns them. `price`: of launches before prices were recorded.
    """
    seconds: dict[float | None, float] = {}
    counted = 0.0
    for record in records:
        if counted >= elapsed_seconds:
            break
        if record.get("event") == "start":
            price = record.get("price_per_hour", price)  # of this record and those that follow
        reached = min(max(counted, record.get("elapsed_seconds", 0.0)), elapsed_seconds)
        seconds[price] = seconds.get(price, 0.0) + reached - counted
        counted = reached
    if counted < elapsed_seconds:  # saved after the last record
        seconds[price] = seconds.get(price, 0.0) + elapsed_seconds - counted
    return {price: value for price, value in seconds.items() if value > 0}
