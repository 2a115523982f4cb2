"""Time and cost of runs by part: bars of one scale, and a table."""

import math
from collections.abc import Sequence

import attrs

from reporting.run_facts import time_text
from reporting.run_history import RunHistory
from training.telemetry.time_ledger import LOST, PARTS

COLOURED = (*PARTS, LOST)  # each has its colour in every report: .part-0 to .part-7 of report_page.css
DIGITS = 4  # significant ones of a total in dollars: enough to see its parts


@attrs.frozen(kw_only=True)
class LedgerPart:
    """A part of a run's time."""

    name: str
    style: str
    share: float  # of the whole
    seconds: str
    usd: str  # "" without a price


@attrs.frozen(kw_only=True)
class LedgerBar:
    """The time of a run."""

    name: str
    length: float  # as a share of the longest
    parts: list[LedgerPart]  # none before the first job has ended
    seconds: str
    usd: str  # "" without a price
    lost: bool  # some was spent by jobs that were killed


def ledger_bars(histories: Sequence[RunHistory]) -> list[LedgerBar]:
    """Return the bar of each run. A part below zero, as after a change of the clock, has no length."""
    lengths = [_length(history) for history in histories]
    return [
        LedgerBar(
            name=history.name,
            length=length / max(lengths) if length else 0.0,
            parts=_parts(history, length) if length else [],
            seconds=time_text(sum(history.ledger.values())),
            usd=usd_text(history.ledger_usd, history.ledger_usd),
            lost=history.ledger.get(LOST, 0.0) > 0,
        )
        for history, length in zip(histories, lengths, strict=True)
    ]


def usd_text(usd: float | None, total: float | None) -> str:
    """Return a part of a total, with as many digits as the total has; "" where it is unknown."""
    if usd is None or total is None:
        return ""
    digits = max(2, DIGITS - 1 - math.floor(math.log10(total))) if total > 0 else 2
    least = 10.0**-digits
    return f"< ${least:.{digits}f}" if 0 < usd < least / 2 else f"${usd:,.{digits}f}"


def _length(history: RunHistory) -> float:
    return sum(max(0.0, seconds) for seconds in history.ledger.values())


def _parts(history: RunHistory, length: float) -> list[LedgerPart]:
    total = sum(history.ledger.values())
    parts = []
    for name, seconds in history.ledger.items():
        usd = history.ledger_usd * seconds / total if history.ledger_usd is not None and total > 0 else None
        colour = COLOURED.index(name) if name in COLOURED else COLOURED.index("idle")
        part = LedgerPart(
            name=name,
            style=f"part-{colour}",
            share=max(0.0, seconds) / length,
            seconds="< 1 s" if 0 < seconds < 0.5 else time_text(seconds),
            usd=usd_text(usd, history.ledger_usd),
        )
        parts += [part] if seconds else []
    return parts
