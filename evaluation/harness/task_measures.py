"""Measures of lm-evaluation-harness: one for each metric of a task.

Models are not ranked by them: results hold no answers to single documents, so differences cannot be paired.
"""

import json
from typing import Any

from evaluation.harness.harness import DOCUMENTS, metrics_of
from evaluation.shared.measure import EvaluationResult, Measure, Measurement


def read_results(record: dict[str, Any]) -> list[EvaluationResult]:
    """Return a stored result of `evaluate.py harness`, one for each task: tasks are compared separately."""
    tasks = record["tasks"].items()
    return [_read_task(record, task, values) for task, values in tasks if isinstance(values, dict)]


def _read_task(record: dict[str, Any], task: str, values: dict[str, Any]) -> EvaluationResult:
    evaluation, documents = f"harness {task}", values.get(DOCUMENTS)
    shots = "" if record.get("fewshot") is None else f", {record['fewshot']} examples in the context"
    count = "" if documents is None else f" on {documents:,} documents"
    version = record.get("lm_eval")  # another version may ask otherwise
    return EvaluationResult(
        evaluation=evaluation,
        model=record["model"],
        time=str(record.get("time")),
        subject=json.dumps([evaluation, version, record.get("fewshot"), record.get("limit"), documents]),
        description=f"lm-evaluation-harness {version}{count}{shots}; ± is its standard error; no pairs, no winner",
        measurements=[
            Measurement(measure=Measure(name=f"{task}, {metric}"), value=value, error=error)
            for metric, value, error in metrics_of(values)
        ],
    )
