"""Prices of a run's jobs: each counts at its own, and one without at that of the last job that has one."""

from collections.abc import Iterator, Sequence
from typing import Any


def last_price(lines: Sequence[dict[str, Any]], otherwise: float | None = None) -> float | None:
    """Return the price per hour of the last job that has one, else `otherwise`.

    `lines`: of all jobs, as `read_lines` returns them.
    """
    prices = [line.get("price_per_hour") for line in lines if line.get("event") == "start"]
    return next((price for price in reversed(prices) if price is not None), otherwise)


def priced_seconds(
    lines: Sequence[dict[str, Any]], otherwise: float | None = None
) -> Iterator[tuple[float, float | None]]:
    """Yield for each line the seconds of the run so far, and the price per hour of those since the line before."""
    known = price = last_price(lines, otherwise)
    reached = 0.0
    for line in lines:
        if line.get("event") == "start":
            price = known if line.get("price_per_hour") is None else line["price_per_hour"]
        reached = max(reached, line.get("elapsed_seconds", 0.0))
        yield reached, price
