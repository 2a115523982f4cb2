"""Data of a report's page to download: the contents of the page about a run, as JSON."""

import base64
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from common.line_chart import extremes
from reporting.run_facts import DifferingSetting, facts, recipe
from reporting.run_history import RunHistory
from reporting.samples.sample_log import read_samples, spaced
from training.telemetry.curves import Curve

if TYPE_CHECKING:
    from evaluation.shared.measure import EvaluationResult

DATA_COLUMNS = 250  # of each curve, with its extremes
VALUE_DIGITS = 6  # significant ones
MOST_SAMPLES = 12  # checkpoints whose texts are there; all of them are in samples.jsonl


def data_link(
    run: Path, history: RunHistory, differing: Sequence[DifferingSetting], results: "Iterable[EvaluationResult]"
) -> str:
    """Return a run's data as a link to JSON.

    `differing`: the settings that differ between the runs of the page; `results`: measurements of the run.
    """
    samples = read_samples(run)
    steps = np.linspace(0, history.step, DATA_COLUMNS)
    content: dict[str, Any] = {
        "run": history.name,
        "state": history.state,
        "facts": dict(facts(history)),
        "settings": dict(recipe(history)),
        "differing_settings": {setting.name: setting.values for setting in differing},
        "curves": {
            name: _points(Curve(*extremes(curve.steps, curve.values, DATA_COLUMNS)))
            for name, curve in history.curves.items()
        },
        "axes": {axis: _points(Curve(steps.round(1), history.along(axis, steps))) for axis in history.axes},
        "events": [attrs.asdict(mark) for mark in history.marks],
        "ledger_seconds": history.ledger,
        "samples": [
            {"step": sample.step, "said": list(map(attrs.asdict, sample.said))}
            for sample in spaced([sample for sample in samples if sample.said], MOST_SAMPLES)
        ],
        "mean_log_probabilities": [
            {"step": one.step, "text": one.held_out.source, "nats_per_token": _rounded(-one.mean_nats)}
            for one in samples
            if one.mean_nats is not None and one.held_out is not None
        ],
        "evaluations": [
            {
                "model": result.model,
                "evaluation": result.evaluation,
                "data": result.description,
                "time": result.time,
                "measure": one.measure.name,
                "value": _rounded(one.value),
                "interval": list(map(_rounded, one.bounds or ())),  # 95 %
            }
            for result in results
            for one in result.measurements
        ],
    }
    return "data:application/json;base64," + base64.b64encode(json.dumps(content).encode()).decode()


def _points(curve: Curve) -> dict[str, Any]:
    return {"steps": curve.steps.tolist(), "values": list(map(_rounded, curve.values.tolist()))}


def _rounded(value: float) -> float | None:
    return float(f"{value:.{VALUE_DIGITS}g}") if math.isfinite(value) else None
