"""Page of a report: one HTML file that opens anywhere, without network, server or script."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from common.clock import utc_now
from common.errors import BadInput
from common.web_page import render, template_text
from reporting.ledger_bars import ledger_bars
from reporting.page_data import data_link
from reporting.run_charts import charted_axes, legend
from reporting.run_facts import differing_settings, facts, headline, recipe
from reporting.run_history import RunHistory
from reporting.section import Section
from training.checkpoints.directory import checkpoints_of, steps_in
from training.telemetry.metrics_log import EVALUATIONS

if TYPE_CHECKING:
    from evaluation.comparison.rows import Row


def report_page(runs: Sequence[Path], histories: Sequence[RunHistory], sections: Sequence[Section]) -> str:
    """Return the page of runs and their histories. `sections`: shown after the curves."""
    from markupsafe import Markup

    rows, compared, advice = _evaluations(runs)
    results = {row.home.resolve(): row.results for row in rows}
    differing = differing_settings(histories)
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
        differing=differing,
        histories=histories,
        bars=ledger_bars(histories),
        facts=[facts(history) for history in histories],
        recipes=[recipe(history) for history in histories],
        checkpoints=[steps_in(checkpoints_of(run)) for run in runs],
        compared=None if compared is None else Markup(compared),
        advice=advice,
        data=[
            (history.name, data_link(run, history, differing, results.get(run.resolve(), [])))
            for run, history in zip(runs, histories, strict=True)
        ],
    )


def _evaluations(runs: Sequence[Path]) -> "tuple[list[Row], str | None, str | None]":
    """Return the rows of the runs that have results, their comparison as HTML, and advice on those that have none."""
    measured = [run for run in runs if (run / EVALUATIONS).is_file()]
    missing = [str(run) for run in runs if run not in measured]
    advice = f"To measure the held-out loss: python evaluate.py loss {shlex.join(missing)}" if missing else None
    if not measured:
        return [], None, f"No evaluations yet. {advice}"
    from evaluation.comparison.compare import compare
    from evaluation.comparison.page import as_fragment
    from evaluation.comparison.rows import read_rows

    try:
        rows = read_rows([str(run) for run in measured])
        compared = as_fragment(compare(rows))
    except BadInput as error:
        return [], None, " ".join(filter(None, [f"No comparison: {error}.", advice]))
    return rows, compared, advice and f"No evaluations of {len(missing)} of {len(runs)} runs. {advice}"
