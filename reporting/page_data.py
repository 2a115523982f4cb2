"""Data of a report's page to download: what the page shows of a run, as JSON."""

import base64
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.errors import BadInput
from reporting.line_chart import extremes
from reporting.run_facts import DifferingSetting, facts, recipe
from reporting.run_history import RunHistory
from reporting.samples.sample_log import CheckpointSample, read_samples, spaced
from training.telemetry.metrics_log import EVALUATIONS

COLUMNS = 250  # of each curve, with its extremes
DIGITS = 6  # significant ones
MOST_SAMPLES = 12  # checkpoints whose texts are there; all of them are in samples.jsonl


def data_link(run: Path, history: RunHistory, differing: Sequence[DifferingSetting]) -> str:
    """Return a run's data as a link to JSON. `differing`: the settings that differ between the runs of the page."""
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
        "evaluations": list(_evaluations(run)),
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
        known = [value for value in sample.log_probabilities or [] if value is not None]
        if known and sample.held_out is not None:
            yield {
                "step": sample.step,
                "text": sample.held_out.source,
                "nats_per_token": _rounded(math.fsum(known) / len(known)),
            }


def _evaluations(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the measurements of the checkpoint that was measured last, with their 95 % intervals."""
    from evaluation.comparison.rows import read_rows

    try:
        rows = read_rows([str(run)]) if (run / EVALUATIONS).is_file() else []
    except BadInput:  # the page says so
        return
    for result in [result for row in rows for result in row.results]:
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
