"""Scale of a chart's axis: its range, and round values to label in it."""

import math
from collections.abc import Callable, Sequence
from html import escape

import numpy as np

TICKS = 5
MOST_POWERS = 8  # of ten that a logarithmic axis labels
LAST_SHARE = 0.96  # of the x axis: a label from there on ends at its place, or it would stick out

Tick = tuple[float, str]  # a value and its label


def value_range(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the least and the greatest finite value; two different numbers where there is one, or none."""
    joined = np.concatenate([one[np.isfinite(one)] for one in values]) if values else np.zeros(0)
    if not len(joined):
        return 0.0, 1.0
    first, last = float(joined.min()), float(joined.max())
    if last - first > 1e-9 * max(abs(first), abs(last)):
        return first, last
    return (first - 0.1 * abs(first), last + 0.1 * abs(last)) if first else (0.0, 1.0)


def ticks(low: float, high: float, *, logarithmic: bool) -> list[Tick]:
    """Return round values between two, with their labels."""
    found = _powers(low, high) if logarithmic else []
    return found if len(found) > 1 else _multiples(low, high)


def short(value: float, step: float | None = None) -> str:
    """Return a number in few characters: 1.5M, 2k, 0.004. `step`: between neighbors, which sets the digits."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (1 if step is None else 1 - 1e-9):
            return f"{value / size:.4g}{letter}"
    if step is not None and step < 1:
        exponent = math.floor(math.log10(step) + 1e-9)
        halves = not math.isclose(step / 10**exponent, round(step / 10**exponent))  # 2.5 has a digit more
        return f"{value:.{halves - exponent}f}"
    return f"{value:.4g}"


def tick_labels(marks: Sequence[Tick], share: Callable[[float], float], side: str) -> str:
    """Return labels as HTML. `share`: of the axis, from its `side`, left or bottom, to a value."""
    placed = [(share(value), text) for value, text in marks]
    return "".join(
        f'<span{" class=last" if side == "left" and at > LAST_SHARE else ""} style="{side}:{100 * at:.2f}%">'
        f"{escape(text)}</span>"
        for at, text in placed
    )


def _multiples(low: float, high: float) -> list[Tick]:
    rough = (high - low) / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(number * step, short(number * step, step)) for number in numbers]


def _powers(low: float, high: float) -> list[Tick]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = powers[:: math.ceil(len(powers) / MOST_POWERS)]
    factors = (1,) if high / low > 1e3 else (1, 3) if high / low > 10 else (1, 1.5, 2, 3, 5, 7)
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [(value, short(value)) for value in values if low <= value <= high]
