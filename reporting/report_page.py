"""Page of a report: one HTML file that opens anywhere, without network, server or script."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from common.clock import utc_now
from common.errors import BadInput
from common.files import replace_file, writing
from common.web_page import render
from reporting.page_data import data_link
from reporting.run_charts import charted_axes, legend
from reporting.run_facts import differing_settings, facts, headline, recipe, time_text
from reporting.run_history import RunHistory
from training.checkpoints.directory import checkpoints_of, steps_in
from training.telemetry.metrics_log import EVALUATIONS
from training.telemetry.time_ledger import LOST, PARTS

if TYPE_CHECKING:
    from markupsafe import Markup

    from evaluation.comparison.rows import Row

SIGN = b"Lockstep's <code>report.py</code>"  # on every page of a report
COLOURED = (*PARTS, LOST)  # each has its colour in every report: .part-0 to .part-7 of report_page.css
USD_DIGITS = 4  # significant ones of a total in dollars: enough to see its parts


@attrs.frozen(kw_only=True)
class LedgerPart:
    """A part of a run's time."""

    name: str
    colour: int  # CSS class part-0 to part-7
    share: float  # of the whole; none of a part below zero, as after a change of the clock
    seconds: str
    usd: str  # "" without a price


def report_page(runs: Sequence[Path], histories: Sequence[RunHistory], sections: "Mapping[str, Markup]") -> str:
    """Return the page of runs and their histories. `sections`: shown after the curves, by title."""
    rows, compared, advice = _evaluations(runs)
    results = {row.home.resolve(): row.results for row in rows}
    differing = differing_settings(histories)
    totals = [sum(history.ledger.values()) for history in histories]
    return render(
        "reporting/templates/report_page.html",
        title=" / ".join(history.name for history in histories),
        written=utc_now(),
        headlines=[(history.name, headline(history)) for history in histories],
        axes=charted_axes(histories),
        legend=legend(histories),
        marked=sorted({mark.kind for mark in histories[0].marks}) if len(histories) == 1 else [],
        sections=sections,
        differing=differing,
        histories=histories,
        ledgers=[list(ledger_parts(history)) for history in histories],
        lengths=[100 * max(0.0, total) / max(1e-9, *totals) for total in totals],
        totals=[
            (time_text(total), usd_text(history.ledger_usd, history.ledger_usd))
            for total, history in zip(totals, histories, strict=True)
        ],
        facts=[list(facts(history)) for history in histories],
        recipes=[recipe(history) for history in histories],
        checkpoints=[steps_in(checkpoints_of(run)) for run in runs],
        compared=compared,
        advice=advice,
        data=[
            (history.name, data_link(run, history, differing, results.get(run.resolve(), [])))
            for run, history in zip(runs, histories, strict=True)
        ],
    )


def write_report(file: Path, page: str) -> None:
    """Write a page atomically; text that is not Unicode, such as a name of bytes, is escaped. Raises BadInput."""
    with writing(file):
        replace_file(file, page.encode(errors="backslashreplace"))


def ledger_parts(history: RunHistory) -> Iterator[LedgerPart]:
    """Yield the parts of a run's time that are not zero; none before the first job has ended."""
    total, length = sum(history.ledger.values()), sum(max(0.0, seconds) for seconds in history.ledger.values())
    for name, seconds in history.ledger.items():
        if seconds and length:
            usd = history.ledger_usd * seconds / total if history.ledger_usd is not None and total > 0 else None
            yield LedgerPart(
                name=name,
                colour=COLOURED.index(name if name in COLOURED else "idle"),
                share=max(0.0, seconds) / length,
                seconds="< 1 s" if 0 < seconds < 0.5 else time_text(seconds),
                usd=usd_text(usd, history.ledger_usd),
            )


def usd_text(usd: float | None, total: float | None) -> str:
    """Return a part of a total, with as many digits as the total has; "" where it is unknown."""
    if usd is None or total is None:
        return ""
    digits = max(2, USD_DIGITS - 1 - math.floor(math.log10(total))) if total > 0 else 2
    least = 10.0**-digits
    return f"< ${least:.{digits}f}" if 0 < usd < least / 2 else f"${usd:,.{digits}f}"


def _evaluations(runs: Sequence[Path]) -> "tuple[list[Row], Markup | None, str | None]":
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
