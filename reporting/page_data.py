"""Data of a report's page to download: what the page shows of a run, as JSON."""

import base64
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from common.line_chart import extremes
from reporting.run_facts import DifferingSetting, facts, recipe
from reporting.run_history import RunHistory
from reporting.samples.sample_log import CheckpointSample, read_samples, spaced

if TYPE_CHECKING:
    from evaluation.shared.measure import EvaluationResult

COLUMNS = 250  # of each curve, with its extremes
DIGITS = 6  # significant ones
MOST_SAMPLES = 12  # checkpoints whose texts are there; all of them are in samples.jsonl


def data_link(
    run: Path, history: RunHistory, differing: Sequence[DifferingSetting], results: "Iterable[EvaluationResult]"
) -> str:
    """Return a run's data as a link to JSON.

    `differing`: the settings that differ between the runs of the page; `results`: measurements of the run.
    """
    samples = read_samples(run)
    said = [sample for sample in samples if sample.said]
    content: dict[str, Any] = {
        "run": history.name,
        "state": history.state,
        "facts": dict(facts(history)),
        "settings": dict(recipe(history)),
        "differing_settings": {setting.name: setting.values for setting in differing},
        **_curves(history),
        "events": [attrs.asdict(mark) for mark in history.marks],
        "ledger_seconds": history.ledger,
        "samples": [
            {"step": sample.step, "said": list(map(attrs.asdict, sample.said))} for sample in spaced(said, MOST_SAMPLES)
        ],
        "mean_log_probabilities": list(_means(samples)),
        "evaluations": [measured for result in results for measured in _measurements(result)],
    }
    return "data:application/json;base64," + base64.b64encode(json.dumps(content).encode()).decode()


def _curves(history: RunHistory) -> dict[str, Any]:
    curves, axes = {}, {}
    for name, curve in history.curves.items():
        steps, values = extremes(curve.steps, curve.values, COLUMNS)
        curves[name] = {"steps": steps.astype(int).tolist(), "values": list(map(_rounded, values.tolist()))}
    for name, curve in history.axes.items():
        steps = np.linspace(0, history.step, COLUMNS)
        values = np.interp(steps, curve.steps, curve.values)
        axes[name] = {"steps": steps.round(1).tolist(), "values": list(map(_rounded, values.tolist()))}
    return {"curves": curves, "axes": axes}


def _means(samples: Sequence[CheckpointSample]) -> Iterator[dict[str, Any]]:
    """Yield the mean log-probability of the held-out text by each checkpoint, nats per token."""
    for sample in samples:
        if sample.mean_nats is not None and sample.held_out is not None:
            yield {
                "step": sample.step,
                "text": sample.held_out.source,
                "nats_per_token": _rounded(-sample.mean_nats),
            }


def _measurements(result: "EvaluationResult") -> Iterator[dict[str, Any]]:
    """Yield the values of a result, with their 95 % intervals."""
    for one in result.measurements:
        yield {
            "model": result.model,
            "evaluation": result.evaluation,
            "data": result.description,
            "time": result.time,
            "measure": one.measure.name,
            "value": _rounded(one.value),
            "interval": list(map(_rounded, one.bounds or ())),
        }


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
