"""Columns of a comparison: the measures of each evaluation, and how two models differ in them."""

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from evaluation.shared.intervals import Interval, plus_minus, student_quantile
from evaluation.shared.ratio import ratio

Result = dict[str, Any]  # a line of evaluations.jsonl


@attrs.frozen(kw_only=True)
class Cell:
    """What a table shows."""

    text: str
    value: float | None = None
    low: float | None = None
    high: float | None = None


@attrs.frozen(kw_only=True)
class Measure:
    """A column of a comparison."""

    name: str
    kind: str  # of evaluation
    unit: str
    digits: int
    sign: int  # 1 where more is better, -1 where less is
    read: Callable[[Result, int], Cell]
    # Of a over b, means over the results of each, with the confidence that is asked for; None: differences are not told
    difference: Callable[[list[Result], list[Result], float], Interval | None] | None


def _loss(key: str) -> Callable[[Result, int], Cell]:
    return lambda result, digits: with_error(result[key], result.get(f"{key}_error"), digits)


def _accuracy(style: str) -> Callable[[Result, int], Cell]:
    return lambda result, digits: with_error(result[style]["acc_norm"], result[style].get("acc_norm_error"), digits)


def _over_seeds(key: str) -> Callable[[Result, int], Cell]:
    """Return a mean over seeds; its error is that over questions, which is the same ones', and that over seeds."""

    def read(result: Result, digits: int) -> Cell:
        value, spread = result[key]["value"], result[key]["spread"]
        if value is None:
            return Cell(text="")
        errors = [seed[f"{key}_error"] for seed in result["seeds"]]
        if not errors or None in errors:
            return with_error(value, None, digits)
        over_questions = math.fsum(errors) / len(errors)  # of the same questions: they do not average out
        return with_error(value, math.hypot(over_questions, (spread or 0) / math.sqrt(len(errors))), digits)

    return read


def _judged(result: Result, digits: int) -> Cell:
    score = result["score"]
    value, low, high = score["value"], score.get("low"), score.get("high")
    text = f"{value:.{digits}f}" + ("" if low is None else f" [{low:.{digits}f}, {high:.{digits}f}]")
    return Cell(text=text, value=value, low=low, high=high)


def with_error(value: float, error: float | None, digits: int) -> Cell:
    """Return the cell of a value with its standard error."""
    ends = (None, None) if error is None else (value - 1.96 * error, value + 1.96 * error)
    return Cell(text=plus_minus(value, error, digits), value=value, low=ends[0], high=ends[1])


def _loss_difference(a: list[Result], b: list[Result], confidence: float) -> Interval | None:
    """Compare group by group: what makes a text hard for both leaves their difference."""
    nats = [np.mean([result["groups"]["nats"] for result in side], axis=0, dtype=np.float64) for side in (a, b)]
    one, other, sizes = np.array([*nats, a[0]["groups"]["tokens"]], np.float64)
    value, error = ratio(one - other, sizes)
    return _interval(value, error, len(sizes), confidence)


def _accuracy_difference(style: str) -> Callable[[list[Result], list[Result], float], Interval | None]:
    """Compare item by item (McNemar, Psychometrika 12, 1947): only items that one of the two has right tell.

    The variance is that of two items more, on which the two disagree by one half each way: without, no item on which
    they disagree would be an interval without width (Agresti and Min, Statistics in Medicine 24, 2005).
    """

    def difference(a: list[Result], b: list[Result], confidence: float) -> Interval | None:
        items = int(a[0]["items"])
        hits = [np.mean([_bits(result[style]["hits_norm"], items) for result in side], axis=0) for side in (a, b)]
        by_item = hits[0] - hits[1]
        shrunk = float(by_item.sum()) / (items + 2)
        variance = (float(np.square(by_item).sum()) + 1) / (items + 2) - shrunk**2
        error = math.sqrt(variance / (items + 1)) if items > 1 else None
        return _interval(float(by_item.mean()), error, items, confidence)

    return difference


def _bits(packed: str, items: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8))[:items].astype(np.float64)


def _judged_difference(a: list[Result], b: list[Result], _: float) -> Interval | None:
    """Return what the session says of two sides; its intervals hold for all of its pairs together.

    Of several candidates a side it is the mean of their differences, with an interval as wide as theirs on average.
    """
    found = [pair for one in a for other in b if (pair := _judged_pair(one, other)) is not None]
    if not found:
        return None
    ends = [[getattr(pair, end) for pair in found] for end in ("value", "low", "high")]
    value, low, high = (None if None in end else math.fsum(end) / len(end) for end in ends)
    assert value is not None
    return Interval(value=value, low=low, high=high)


def _judged_pair(a: Result, b: Result) -> Interval | None:
    # What the session calls them: models of one title get others. Older results do not tell.
    pair = [result.get("candidate", result["model"]) for result in (a, b)]
    for entry in a["differences"]:
        found = Interval(value=entry["value"], low=entry.get("low"), high=entry.get("high"))
        if [entry["a"], entry["b"]] == pair:
            return found
        if [entry["b"], entry["a"]] == pair:
            return -found
    return None


def _interval(value: float, error: float | None, units: int, confidence: float) -> Interval:
    if error is None:
        return Interval(value=value, low=None, high=None)
    reach = student_quantile((1 + confidence) / 2, units - 1) * error
    return Interval(value=value, low=value - reach, high=value + reach)


HELD_OUT, BITS = "held-out loss", "bits/byte"
COMPLETION, LM_EVAL = "HellaSwag, completion", "HellaSwag, lm-eval"
JUDGED = "judge's score"
MEASURES = [
    Measure(
        name=HELD_OUT,
        kind="loss",
        unit="nats a token",
        digits=4,
        sign=-1,
        read=_loss("nats_per_token"),
        difference=_loss_difference,
    ),
    # On the same tokens bits a byte are the same comparison.
    Measure(
        name=BITS, kind="loss", unit="bits a byte", digits=4, sign=-1, read=_loss("bits_per_byte"), difference=None
    ),
    *(
        Measure(
            name=name,
            kind="hellaswag",
            unit="of all items",
            digits=4,
            sign=1,
            read=_accuracy(style),
            difference=_accuracy_difference(style),
        )
        for name, style in ((COMPLETION, "completion"), (LM_EVAL, "lm_eval"))
    ),
    # Scores of single questions are not kept: differences cannot be paired.
    Measure(name="chrF", kind="instruct", unit="", digits=2, sign=1, read=_over_seeds("chrf"), difference=None),
    Measure(
        name="reference loss",
        kind="instruct",
        unit="nats a token",
        digits=4,
        sign=-1,
        read=_over_seeds("reference_loss"),
        difference=None,
    ),
    Measure(name=JUDGED, kind="judge", unit="points", digits=2, sign=1, read=_judged, difference=_judged_difference),
]
