"""Measure of HellaSwag: accuracy, compared item by item."""

import math
from typing import Any

import numpy as np

from evaluation.shared.measure import EvaluationResult, Measure, Measurement, Published
from evaluation.shared.significance import Interval, student_interval


def accuracy_difference(a: list[np.ndarray], b: list[np.ndarray], confidence: float) -> Interval:
    """Return the difference of accuracies, paired by item (McNemar, Psychometrika 12, 1947).

    Only items that exactly one of the two models answers correctly count. `a`, `b`: for each seed, 1 for an item
    answered correctly, else 0, float64 (items,). The variance is that of two items more, on which the two disagree by
    one half each way: otherwise models that agree on every item would get an interval without width (Agresti and Min,
    Statistics in Medicine 24, 2005).
    """
    by_item = np.mean(a, axis=0) - np.mean(b, axis=0)
    items = len(by_item)
    shrunk = float(by_item.sum()) / (items + 2)
    variance = (float(np.square(by_item).sum()) + 1) / (items + 2) - shrunk**2
    error = math.sqrt(variance / (items + 1)) if items > 1 else None
    return student_interval(float(by_item.mean()), error, items - 1, confidence)


COMPLETION = Measure(
    name="HellaSwag, completion",
    unit="of all items",
    difference=accuracy_difference,
    published=Published(
        values={"OpenAI GPT-2 small": "0.2955", "OpenAI GPT-2 XL": "0.4893"},
        source="karpathy/build-nanogpt, hellaswag.py: acc_norm on all 10,042 items of the validation split",
    ),
)


def read_results(record: dict[str, Any]) -> list[EvaluationResult]:
    """Return a stored result of `evaluate.py hellaswag`."""
    data, items, found = record["data"], record["items"], record["completion"]
    hits = np.unpackbits(np.frombuffer(bytes.fromhex(found["hits_norm"]), np.uint8))[:items].astype(np.float64)
    if not 0 < items == len(hits):
        raise ValueError(f"{items} items, but answers to {len(hits)}")
    value, error = found["acc_norm"], found.get("acc_norm_error")
    result = EvaluationResult.of(
        record,
        subject=f"{data['sha256']} {items} {len(found['hits_norm'])}",
        description=f"acc_norm on {items:,} items of {data['file']}; ± is a standard error over items",
        measurements=[Measurement(measure=COMPLETION, value=value, error=error, freedom=items - 1, sample=hits)],
    )
    return [result]
