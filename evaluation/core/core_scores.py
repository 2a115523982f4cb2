"""Scores of CORE: accuracy centered on chance, and bits per byte of the gold answers; paired by item."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from evaluation.core.bundle import DOWNLOADED, IS_NANOCHATS, LABELS
from evaluation.shared.results import EvaluationResult, Measure, Measurement, Published
from evaluation.shared.significance import Interval, combined_error, hits_error, mean_and_error, student_interval

TASKS = 22  # of CORE
PUBLISHED = {"GPT-2 small": "0.1139", "GPT-2 medium": "0.1849", "GPT-2 large": "0.2146", "GPT-2 XL": "0.2565"}
SOURCE = "karpathy/nanochat, dev/estimate_gpt3_core.ipynb, all items"


@attrs.frozen
class ItemValues:
    """The share of the mean over tasks that each item of a file contributes."""

    values: np.ndarray  # float64 (items,)
    step: float = 0.0  # value of a hit less that of a miss; 0: the value is no hit or miss, but a measured number


Parts = Mapping[str, ItemValues]  # by file of items


@attrs.frozen
class CoreSample:
    parts: Parts
    is_published_data: bool  # the items of which others have published scores


def is_published_data(data: Mapping[str, Any], tasks: Collection[str]) -> bool:
    """Tell whether scores of a bundle are comparable with the published ones: all items of nanochat's own archive.

    `data` is the bundle as `read_bundle` describes it. Results of earlier versions tell no more than the file's name.
    """
    is_whole = data["count"] is None and {*tasks} == {*LABELS}
    return is_whole and data.get(IS_NANOCHATS, data.get("file") == str(DOWNLOADED)) is True


def other_data(data: Mapping[str, Any], tasks: Collection[str]) -> str:
    """Return why the scores of a bundle are not comparable with the published ones."""
    if data["count"] is not None:
        return f"here at most {data['count']:,} items of a task are measured"
    if len(tasks) < TASKS:
        return f"here {len(tasks)} of {TASKS} tasks are measured"
    if data["file"] == str(DOWNLOADED):
        return f"no download has recorded the sha256 of {DOWNLOADED}; move it away to download nanochat's archive"
    return f"{data['file']} is not known to be nanochat's archive; leave out --bundle to use that"


def task_score(dataset: str, baseline: float, hits: np.ndarray, bits: np.ndarray) -> dict[str, Any]:
    """Return a task's score to store: means and their errors over items, and each item, for subsets and pairs.

    `dataset`: file of the items; `baseline`: accuracy by chance; `hits` bool, `bits` float64 (items,): whether an item
    is answered, and the bits per byte of its gold answer, in the order in which they were measured.
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


def over_tasks(tasks: Mapping[str, dict[str, Any]]) -> tuple[Parts, Parts]:
    """Return centered scores and gold bits per byte as parts of their means over tasks. Raises ValueError.

    Tasks that share a file share its order: they are one part, since their errors are correlated.
    """
    parts: tuple[dict[str, ItemValues], dict[str, ItemValues]] = {}, {}
    for task in tasks.values():
        hits = np.unpackbits(np.frombuffer(bytes.fromhex(task["hits"]), np.uint8))[: task["items"]]
        scale = 1 / (1 - task["baseline"]) / len(tasks)
        centered = ItemValues((hits - task["baseline"]) * scale, scale)
        gold = ItemValues(np.array(task["gold_bits"], np.float64) / len(tasks))
        for part, more in zip(parts, (centered, gold), strict=True):
            if not 0 < task["items"] == len(more.values):
                raise ValueError(f"{task['items']} items, but values of {len(more.values)}")
            known = part.get(task["dataset"], ItemValues(np.zeros(1)))
            part[task["dataset"]] = ItemValues(known.values + more.values, known.step + more.step)
    return parts


def sum_of_means(parts: Parts, *, paired: bool = False) -> tuple[float, float | None, float]:
    """Return the sum of the means of independent parts, its standard error, None of one unit, and its freedom."""
    found = [(*_mean_and_error(part, paired=paired), len(part.values) - 1) for part in parts.values()]
    errors = [(error, freedom) for _, error, freedom in found if error is not None]
    error, freedom = combined_error(*errors) if len(errors) == len(found) else (None, math.inf)
    return math.fsum(mean for mean, _, _ in found), error, freedom


def core_difference(a: list[CoreSample], b: list[CoreSample], confidence: float) -> Interval:
    """Return the difference of two means over tasks, paired by item: its difficulty, common to both, cancels."""
    sides = [
        {file: np.mean([one.parts[file].values for one in side], axis=0) for file in side[0].parts} for side in (a, b)
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
        otherwise="Published CORE of OpenAI's GPT-2 is left out: it was measured on nanochat's archive, and this "
        "bundle may be a different one.",
    ),
)
GOLD = Measure(name="gold bits/byte", unit="bits per byte", higher_is_better=False, difference=core_difference)


def read_results(record: dict[str, Any]) -> Iterator[EvaluationResult]:
    """Yield a stored result: that of all items of all tasks, or of a part, which has columns of its own."""
    data, tasks, measurements = record["data"], record["tasks"], []
    whole, labels = data["count"] is None and len(tasks) == TASKS, ", ".join(tasks)
    for measure, parts in zip((CORE, GOLD), over_tasks(tasks), strict=True):
        value, error, freedom = sum_of_means(parts)
        sample = CoreSample(parts, is_published_data(data, tasks))
        shown = measure if whole else attrs.evolve(measure, name=f"{measure.name}, part", published=None)
        measurements.append(Measurement(measure=shown, value=value, error=error, freedom=freedom, sample=sample))
        counts = [(file, len(part.values)) for file, part in parts.items()]
    items = sum(len(task["gold_bits"]) for task in tasks.values())
    yield EvaluationResult.of(
        record,
        evaluation="core" if whole else "core part",
        subject=f"{data['sha256']} {data['count']} {labels} {counts}",
        description=f"{items:,} items of {data['file']}: {labels}; ± is a standard error over items, taken as "
        "independent",
        measurements=measurements,
    )
