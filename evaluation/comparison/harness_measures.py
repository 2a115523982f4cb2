"""Columns for the tasks of lm-evaluation-harness, one for each metric of a task. Differences are not told: it keeps no
answers to single documents, so two models cannot be compared in pairs.
"""

import json
from collections.abc import Callable
from typing import Any

from evaluation.comparison.measures import Cell, Measure, Result, with_error
from evaluation.harness.harness import DOCUMENTS, metrics_of

KIND = "harness"


def by_task(result: Result) -> list[Result]:
    """Return a result of the harness as one for each task, which are compared separately; any other as it is."""
    tasks = result.get("tasks")
    if result.get("evaluation") != KIND or not isinstance(tasks, dict):
        return [result]
    common = {key: value for key, value in result.items() if key != "tasks"}
    return [common | {"evaluation": f"{KIND} {task}", "values": values} for task, values in tasks.items()]


def harness_measures(results: list[Result]) -> list[Measure]:
    """Return the columns for all tasks that any of the results is about, in their order."""
    names = {
        (result["evaluation"], name): None
        for result in results
        if is_task(result)
        for name, _, _ in metrics_of(result["values"])
    }
    return [_measure(kind, name) for kind, name in names]


def is_task(result: Result) -> bool:
    """Tell whether a result is one task's, as `by_task` returns it."""
    return str(result.get("evaluation")).startswith(f"{KIND} ") and isinstance(result.get("values"), dict)


def task_subject(result: Result) -> str:
    """Return what tells the subject of a task's result from others: another version may ask otherwise."""
    how = [result.get(key) for key in ("lm_eval", "fewshot", "limit")]
    return json.dumps([result["evaluation"], *how, result["values"].get(DOCUMENTS)])


def task_described(result: Result) -> str:
    """Return what a task's result is about, for people."""
    shots = "" if result.get("fewshot") is None else f", {result['fewshot']} examples in the context"
    documents = result["values"].get(DOCUMENTS)
    count = "" if documents is None else f" on {documents:,} documents"
    return f"lm-evaluation-harness {result.get('lm_eval')}{count}{shots}; ± is its standard error; no pairs, no winner"


def _measure(kind: str, metric: str) -> Measure:
    return Measure(
        name=f"{kind.removeprefix(f'{KIND} ')}, {metric}",
        kind=kind,
        unit="",
        digits=4,
        sign=1,  # not used without differences
        read=_value(metric),
        difference=None,
    )


def _value(metric: str) -> Callable[[Result, int], Cell]:
    def read(result: dict[str, Any], digits: int) -> Cell:
        found = next(((value, error) for name, value, error in metrics_of(result["values"]) if name == metric), None)
        return Cell(text="") if found is None else with_error(*found, digits)

    return read
