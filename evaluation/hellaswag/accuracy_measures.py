"""Measures of HellaSwag: accuracy by either convention, compared item by item."""

import math
from typing import Any

import numpy as np

from evaluation.hellaswag.command import PUBLISHED
from evaluation.shared.intervals import Interval, student_interval
from evaluation.shared.measure import EvaluationResult, Measure, Measurement, Published

SOURCE = (
    "karpathy/build-nanogpt, hellaswag.py: acc_norm on all 10,042 items of the validation split, by that script and by "
    "lm-eval"
)


def accuracy_difference(a: list[np.ndarray], b: list[np.ndarray], confidence: float) -> Interval:
    """Compare item by item (McNemar, Psychometrika 12, 1947): only items that one of the two has right count.

    `a`, `b`: for each seed which items were hit, float64 (items,). The variance is that of two items more, on which the
    two disagree by one half each way: otherwise models that agree on every item would get an interval without width
    (Agresti and Min, Statistics in Medicine 24, 2005).
    """
    by_item = np.mean(a, axis=0) - np.mean(b, axis=0)
    items = len(by_item)
    shrunk = float(by_item.sum()) / (items + 2)
    variance = (float(np.square(by_item).sum()) + 1) / (items + 2) - shrunk**2
    error = math.sqrt(variance / (items + 1)) if items > 1 else None
    return student_interval(float(by_item.mean()), error, items, confidence)


def _accuracy(name: str, small: float, xl: str) -> Measure:
    values = {"OpenAI GPT-2 small": f"{small:.4f}", "OpenAI GPT-2 XL": xl}
    return Measure(
        name=name,
        unit="of all items",
        difference=accuracy_difference,
        published=Published(values=values, source=SOURCE),
    )


MEASURES = {  # by the key of a stored result
    "completion": _accuracy("HellaSwag, completion", PUBLISHED["completion"][2], "0.4893"),
    "lm_eval": _accuracy("HellaSwag, lm-eval", PUBLISHED["lm-eval"][2], "0.5089"),
}


def read_results(record: dict[str, Any]) -> list[EvaluationResult]:
    """Return a stored result of `evaluate.py hellaswag`."""
    data, items = record["data"], record["items"]
    lengths = [len(record[style]["hits_norm"]) for style in MEASURES]
    measurements = [
        Measurement(
            measure=measure,
            value=record[style]["acc_norm"],
            error=record[style].get("acc_norm_error"),
            sample=_bits(record[style]["hits_norm"], items),
        )
        for style, measure in MEASURES.items()
    ]
    return [
        EvaluationResult(
            evaluation="hellaswag",
            model=record["model"],
            time=str(record.get("time")),
            subject=f"{data['sha256']} {items} {lengths}",
            description=f"acc_norm on {items:,} items of {data['file']}; ± is a standard error over items",
            measurements=measurements,
        )
    ]


def _bits(packed: str, items: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8))[:items].astype(np.float64)
