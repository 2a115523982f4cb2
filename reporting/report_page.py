"""Page of a report: one HTML file that opens anywhere, without network, server or script."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.clock import utc_now
from common.errors import BadInput
from common.files import replace_file, writing
from common.web_page import render
from reporting.run_charts import charted_axes, legend
from reporting.run_facts import differing_settings, facts, headline, recipe, time_text
from reporting.run_history import RunHistory
from training.checkpoints.directory import checkpoints_of, steps_in
from training.telemetry.metrics_log import EVALUATIONS

if TYPE_CHECKING:
    from markupsafe import Markup

SIGN = b"Lockstep's <code>report.py</code>"  # on every page of a report


def report_page(runs: Sequence[Path], histories: Sequence[RunHistory], sections: "Mapping[str, Markup]") -> str:
    """Return the page of runs and their histories. `sections`: shown after the curves, by title."""
    compared, advice = _evaluations(runs)
    return render(
        "reporting/templates/report_page.html",
        title=" / ".join(history.name for history in histories),
        written=utc_now(),
        headlines=[(history.name, headline(history)) for history in histories],
        axes=charted_axes(histories),
        legend=legend(histories),
        marked=sorted({mark.kind for mark in histories[0].marks}) if len(histories) == 1 else [],
        sections=sections,
        differing=differing_settings(histories),
        histories=histories,
        ledgers=[list(ledger_rows(history)) for history in histories],
        facts=[list(facts(history)) for history in histories],
        recipes=[recipe(history) for history in histories],
        checkpoints=[steps_in(checkpoints_of(run)) for run in runs],
        compared=compared,
        advice=advice,
    )


def write_report(file: Path, page: str) -> None:
    """Write a page atomically; text that is not Unicode, such as a name of bytes, is escaped. Raises BadInput."""
    with writing(file):
        replace_file(file, page.encode(errors="backslashreplace"))


def ledger_rows(history: RunHistory) -> Iterator[tuple[str, str, str, float]]:
    """Yield the parts of a run's time that are not zero, then their total: name, time, dollars, share.

    None before the first job has ended. Dollars are "" without a price.
    """
    total, positive = sum(history.ledger.values()), sum(max(0.0, seconds) for seconds in history.ledger.values())
    paid = history.ledger_usd if total > 0 else None
    for name, seconds in [*history.ledger.items(), ("total", total)] if positive else []:
        if seconds:
            usd = "" if paid is None else f"${paid * seconds / total:,.{2 if paid >= 1 else 4}f}"
            yield name, time_text(seconds), usd, max(0.0, seconds) / positive


def _evaluations(runs: Sequence[Path]) -> "tuple[Markup | None, str | None]":
    """Return the comparison of the runs that have results as HTML, and advice on those that have none."""
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
