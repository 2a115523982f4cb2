"""Sizes, dollars and hours as text: never a zero for what is not zero, nor one text for two amounts that differ.

Dollars are counted here as well: a machine's price per hour times its hours. An unknown price is None, and so is what
depends on it.
"""

import math

DECIMAL, BINARY = ("B", "KB", "MB", "GB", "TB", "PB"), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
MOST_DIGITS = 15  # that a float has
SMALLEST = 0.005  # that two decimals show


def readable_bytes(count: float, *, binary: bool = False, digits: int = 3) -> str:
    """Return a number of bytes in its own unit, with this many digits at least: "1.23 GB", "35.5 KB", "12 B"."""
    base, units = (1024, BINARY) if binary else (1000, DECIMAL)
    value, unit = float(count), 0
    while unit < len(units) - 1 and abs(value) >= base:
        value, unit = value / base, unit + 1
    if unit == 0:
        return f"{value:,.0f} B"
    whole = len(f"{abs(value):.0f}")
    return f"{value:,.{max(0, digits - whole)}f} {units[unit]}"


def distinct_bytes(*counts: float) -> list[str]:
    """Return numbers of bytes that are compared in a message: those that differ also differ as text."""
    for digits in range(3, MOST_DIGITS):
        texts = [readable_bytes(count, digits=digits) for count in counts]
        if len({*texts}) == len({*counts}):
            return texts
    return [f"{count:,.0f} B" for count in counts]


def time_cost(seconds: float, price_per_hour: float | None) -> float | None:
    """Return the cost of a machine's time, in dollars; None if its price per hour is unknown."""
    return None if price_per_hour is None else price_per_hour * seconds / 3600


def paid_seconds(usd: float, price_per_hour: float) -> float:
    """Return the seconds of a machine's time that an amount pays for: the inverse of `time_cost`."""
    return usd / price_per_hour * 3600


def dollars(amount: float) -> str:
    """Return an amount with its sign: "$1,234.50", and "$0.0042" for less than a cent."""
    return f"${small_number(amount)}"


def dollars_of_total(amount: float, total: float) -> str:
    """Return a part of a total for a column of parts, all with the same decimals: more for a total below a dollar."""
    return f"${amount:,.{2 if total >= 1 else 4}f}"


def dollars_at_most(amount: float) -> str:
    """Return an amount rounded up: no printed cost is below the bill."""
    return f"${math.ceil(amount * 1e4 - 1e-6) / 1e4:.4f}"


def rough_number(value: float) -> str:
    """Return hours or dollars of an estimate, without more digits than it deserves: "1.89", "18.9", "189"."""
    return f"{value:,.{2 if value < 10 else int(value < 100)}f}"


def small_number(value: float) -> str:
    """Return a number with two decimals, or if that would be zero with two digits: "12.50", "0.0042"."""
    if value == 0 or abs(value) >= SMALLEST:
        return f"{value:,.2f}"
    return f"{value:.2g}"
