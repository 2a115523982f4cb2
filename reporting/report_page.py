"""Page of a report: one HTML file that opens anywhere, without network, server or script."""

import base64
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.clock import utc_now
from common.errors import BadInput
from reporting.ledger_bars import ledger_bars
from reporting.line_chart import extremes
from reporting.page_templates import render, template_text
from reporting.run_charts import charted_axes, legend
from reporting.run_facts import differing_settings, facts, headline, recipe
from reporting.run_history import RunHistory
from reporting.section import Section
from training.checkpoints.disk import checkpoints_of
from training.checkpoints.storage import steps_in
from training.telemetry.metrics_log import EVALUATIONS

DATA_COLUMNS = 250  # of each curve in the data to download, with its extremes
DIGITS = 6  # significant ones, there


def report_page(runs: Sequence[Path], histories: Sequence[RunHistory], sections: Sequence[Section]) -> str:
    """Return the page of runs and their histories. `sections`: shown after the curves."""
    from markupsafe import Markup

    compared, advice = _evaluations(runs)
    return render(
        "report_page.html",
        title=" / ".join(history.name for history in histories),
        written=utc_now(),
        style=Markup(template_text("report_page.css") + "".join(part.style for part in sections)),
        script=Markup(template_text("report_page.js")),
        headlines=[(history.name, headline(history)) for history in histories],
        axes=[(axis.name, axis.unit, Markup("".join(axis.charts))) for axis in charted_axes(histories)],
        legend=legend(histories),
        marked=sorted({mark.kind for mark in histories[0].marks}) if len(histories) == 1 else [],
        sections=[attrs.evolve(part, html=Markup(part.html)) for part in sections],
        differing=differing_settings(histories) if len(histories) > 1 else [],
        histories=histories,
        bars=ledger_bars(histories),
        facts=[facts(history) for history in histories],
        recipes=[recipe(history) for history in histories],
        checkpoints=[steps_in(checkpoints_of(run)) for run in runs],
        compared=None if compared is None else Markup(compared),
        advice=advice,
        data=[(history.name, data_link(history)) for history in histories],
    )


def _evaluations(runs: Sequence[Path]) -> tuple[str | None, str | None]:
    """Return the comparison of the runs that have results, as HTML, and advice on those that have none."""
    measured = [run for run in runs if (run / EVALUATIONS).is_file()]
    missing = [str(run) for run in runs if run not in measured]
    advice = f"To measure the held-out loss: python evaluate.py loss {shlex.join(missing)}" if missing else None
    if not measured:
        return None, f"No evaluations yet. {advice}"
    from evaluation.comparison.compare import compare
    from evaluation.comparison.page import as_fragment
    from evaluation.comparison.rows import read_rows

    try:
        compared = as_fragment(compare(read_rows([str(run) for run in measured])))
    except BadInput as error:
        return None, " ".join(filter(None, [f"No comparison: {error}.", advice]))
    return compared, advice and f"No evaluations of {len(missing)} of {len(runs)} runs. {advice}"


def data_link(history: RunHistory) -> str:
    """Return the run's curves, thinned out, and facts as a link to JSON."""
    curves = {}
    for name, curve in history.curves.items():
        steps, values = extremes(curve.steps, curve.values, DATA_COLUMNS)
        curves[name] = {"steps": steps.astype(int).tolist(), "values": list(map(_rounded, values.tolist()))}
    axes = {}
    for name, curve in history.axes.items():
        steps = np.linspace(0, history.step, DATA_COLUMNS)
        values = np.interp(steps, curve.steps, curve.values)
        axes[name] = {"steps": steps.round(1).tolist(), "values": list(map(_rounded, values.tolist()))}
    content: dict[str, Any] = {
        "run": history.name,
        "state": history.state,
        "facts": dict(facts(history)),
        "settings": dict(recipe(history)),
        "curves": curves,
        "axes": axes,
        "events": [attrs.asdict(mark) for mark in history.marks],
        "ledger_seconds": history.ledger,
    }
    return "data:application/json;base64," + base64.b64encode(json.dumps(content).encode()).decode()


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
