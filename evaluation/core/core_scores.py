"""Scores of CORE: the accuracy centered on chance, and the bits per byte of the gold answers.

Two models are compared item by item.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from evaluation.core.bundle import DOWNLOADED, IS_NANOCHATS, LABELS
from evaluation.shared.results import EvaluationResult, Measure, Measurement, Published
from evaluation.shared.significance import Interval, combined_error, hits_error, mean_and_error, student_interval

TASKS = 22  # number of tasks in CORE
PUBLISHED = {"GPT-2 small": "0.1139", "GPT-2 medium": "0.1849", "GPT-2 large": "0.2146", "GPT-2 XL": "0.2565"}
SOURCE = "karpathy/nanochat, dev/estimate_gpt3_core.ipynb, all items"


@attrs.frozen
class ItemValues:
    """The contribution of each item of a file to the mean over tasks."""

    values: np.ndarray  # float64 (items,)
    step: float = 0.0  # value of a hit minus value of a miss; 0: the values are measurements, not hits and misses


Parts = Mapping[str, ItemValues]  # by file of items


@attrs.frozen
class CoreSample:
    """The values of a result's items, which are used to compare models."""

    parts: Parts
    is_published_data: bool  # True: published scores were measured on the same items


def is_published_data(data: Mapping[str, Any], tasks: Collection[str]) -> bool:
    """Return whether the scores of a bundle can be compared with published ones.

    This is so if the scores were measured on all items of nanochat's own archive. `data`: the description of the bundle
    that `read_bundle` returns. Results of earlier versions have only the name of the bundle's file.
    """
    is_complete = data["count"] is None and {*tasks} == {*LABELS}
    return is_complete and data.get(IS_NANOCHATS, data.get("file") == str(DOWNLOADED)) is True


def reason_not_comparable(data: Mapping[str, Any], tasks: Collection[str]) -> str:
    """Return why the scores of a bundle cannot be compared with published ones."""
    if data["count"] is not None:
        return f"at most {data['count']:,} items per task are measured here"
    if len(tasks) < TASKS:
        return f"only {len(tasks)} of {TASKS} tasks are measured here"
    if data["file"] == str(DOWNLOADED):
        return f"{DOWNLOADED} has no recorded sha256; move it away to download nanochat's archive"
    return f"{data['file']} is not known to be nanochat's archive; to use the archive, leave out --bundle"


def task_score(dataset: str, baseline: float, hits: np.ndarray, bits: np.ndarray) -> dict[str, Any]:
    """Return the fields of a task's score: means over items, their errors, and the values of every item.

    The values are stored so that subsets can be scored later, and so that models can be compared item by item.

    `dataset`: file of the items. `baseline`: accuracy of guessing. `hits`: whether each item was answered correctly,
    bool (items,). `bits`: bits per byte of each gold answer, float64 (items,). `hits` and `bits` have the items in the
    order of measurement.
    """
    accuracy, error = float(np.mean(hits)), hits_error(hits.astype(np.float64), 1.0, paired=False)
    gold, gold_error = mean_and_error(bits)
    return {
        "dataset": dataset,
        "baseline": baseline,
        "items": len(hits),
        "accuracy": accuracy,
        "centered": (accuracy - baseline) / (1 - baseline),
        "centered_error": None if error is None else error / (1 - baseline),
        "gold_bits_per_byte": gold,
        "gold_bits_per_byte_error": gold_error,
        "hits": np.packbits(hits).tobytes().hex(),
        "gold_bits": np.round(bits, 4).tolist(),
    }


def task_parts(tasks: Mapping[str, dict[str, Any]]) -> tuple[Parts, Parts]:
    """Return the independent parts of two means over tasks: the mean centered score and the mean gold bits per byte.

    A mean is the sum of the means of its parts. Tasks that share a file have the same items in the same order. They
    form one part, because their errors are correlated. Raises ValueError if a task does not have a value for each of
    its items.
    """
    parts: tuple[dict[str, ItemValues], dict[str, ItemValues]] = {}, {}
    for task in tasks.values():
        hits = np.unpackbits(np.frombuffer(bytes.fromhex(task["hits"]), np.uint8))[: task["items"]]
        scale = 1 / (1 - task["baseline"]) / len(tasks)
        centered = ItemValues((hits - task["baseline"]) * scale, scale)
        gold = ItemValues(np.array(task["gold_bits"], np.float64) / len(tasks))
        for part, added in zip(parts, (centered, gold), strict=True):
            if not 0 < task["items"] == len(added.values):
                raise ValueError(f"got {len(added.values)} values for {task['items']} items")
            total = part.get(task["dataset"], ItemValues(np.zeros(1)))
            part[task["dataset"]] = ItemValues(total.values + added.values, total.step + added.step)
    return parts


def sum_of_means(parts: Parts, *, paired: bool = False) -> tuple[float, float | None, float]:
    """Return the sum of the means of independent parts, its standard error, and the error's degrees of freedom.

    The error is None if any part has only one item.
    """
    means = [(*_mean_and_error(part, paired=paired), len(part.values) - 1) for part in parts.values()]
    errors = [(error, freedom) for _, error, freedom in means if error is not None]
    error, freedom = combined_error(*errors) if len(errors) == len(means) else (None, math.inf)
    return math.fsum(mean for mean, _, _ in means), error, freedom


def core_difference(a: list[CoreSample], b: list[CoreSample], confidence: float) -> Interval:
    """Return the difference between two means over tasks, paired by item.

    The difficulty of an item is common to both models and cancels in their difference.
    """
    sides = [
        {file: np.mean([sample.parts[file].values for sample in side], axis=0) for file in side[0].parts}
        for side in (a, b)
    ]
    parts = {file: ItemValues(sides[0][file] - sides[1][file], part.step) for file, part in a[0].parts.items()}
    return student_interval(*sum_of_means(parts, paired=True), confidence)


def _mean_and_error(part: ItemValues, *, paired: bool) -> tuple[float, float | None]:
    mean, error = mean_and_error(part.values)
    return mean, hits_error(part.values, part.step, paired=paired) if part.step else error


CORE = Measure(
    name="CORE",
    unit="of the centered score",
    difference=core_difference,
    published=Published(
        values={f"OpenAI {model}": value for model, value in PUBLISHED.items()},
        source=SOURCE,
        comparable=lambda sample: sample.is_published_data,
        otherwise="The published CORE scores of OpenAI's GPT-2 are left out: they were measured on nanochat's archive, "
        "but this bundle may be a different one.",
    ),
)
GOLD = Measure(name="gold bits/byte", unit="bits per byte", higher_is_better=False, difference=core_difference)


def read_results(record: dict[str, Any]) -> Iterator[EvaluationResult]:
    """Yield the result in a stored record. A result for only some tasks or items gets separate columns."""
    data, tasks, measurements = record["data"], record["tasks"], []
    is_complete, labels = data["count"] is None and len(tasks) == TASKS, ", ".join(tasks)
    for measure, parts in zip((CORE, GOLD), task_parts(tasks), strict=True):
        value, error, freedom = sum_of_means(parts)
        sample = CoreSample(parts, is_published_data(data, tasks))
        shown = measure if is_complete else attrs.evolve(measure, name=f"{measure.name}, part", published=None)
        measurements.append(Measurement(measure=shown, value=value, error=error, freedom=freedom, sample=sample))
        counts = [(file, len(part.values)) for file, part in parts.items()]
    items = sum(len(task["gold_bits"]) for task in tasks.values())
    yield EvaluationResult.of(
        record,
        evaluation="core" if is_complete else "core part",
        subject=f"{data['sha256']} {data['count']} {labels} {counts}",
        description=f"{items:,} items of {data['file']}: {labels}; ± is a standard error over items, which are "
        "assumed to be independent",
        measurements=measurements,
    )
