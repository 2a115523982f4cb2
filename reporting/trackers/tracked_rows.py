"""Rows for a tracker: each step of metrics.jsonl, as numbers by name and events as text."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs
import numpy as np

from common.errors import printable
from common.json_files import is_number
from reporting.run_history import clock
from training.telemetry.metrics_log import MOST_SECONDS

NUMBERS = (
    *("train_loss", "validation_loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu"),
    *("peak_memory_bytes", "elapsed_seconds", "skipped_steps"),
)
EVENT_DETAILS = ("problem", "reason", "who", "name", "phase")  # of an event, shown after its name


@attrs.frozen(kw_only=True)
class TrackedRow:
    """All that is known of one step, and the events since the row before it: so a late event changes no earlier row."""

    step: int
    values: dict[str, float] = attrs.field(factory=dict)
    events: list[str] = attrs.field(factory=list)
    time: float | None = None  # Unix time of its last record


def tracked_rows(lines: Sequence[dict[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[TrackedRow]:
    """Return the rows of measured steps. `lines`: all of the file, for the cost; `records`: those that count."""
    seconds, usd = clock(lines)
    rows: dict[int, TrackedRow] = {}
    events: list[str] = []  # that no row has yet
    started = None  # Unix time at which the run had taken no seconds, by the last start
    for record in records:
        own = _unix_time(record.get("time"))
        elapsed = record.get("elapsed_seconds")
        if record.get("event") == "start" and own is not None and elapsed is not None:
            started = own - elapsed
        if own is None and started is not None and elapsed is not None:
            own = started + elapsed
        step = record.get("step", 0)
        if record.get("event") == "start" and rows:  # what the job before has left stays with its last row
            rows[max(rows)].events.extend(events)
            events = []
        if "event" in record:
            events.append(_event(record))
            continue
        row = rows.get(step)
        if row is None:
            row, events = TrackedRow(step=step, events=events), []
        row.values.update(_numbers(record))
        if elapsed is not None and usd is not None:
            row.values["dollars"] = float(np.interp(elapsed, seconds, usd))
        rows[row.step] = row if own is None else attrs.evolve(row, time=own)
    ordered = [rows[step] for step in sorted(rows)]
    if ordered:
        ordered[-1].events.extend(events)
    return ordered


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the measured values; unknown ones, null in the file, are left out."""
    found: dict[str, Any] = {name: record.get(name) for name in NUMBERS}
    for dataset, loss in record.get("validation_losses", {}).items():
        found[f"validation_loss/{printable(dataset)}"] = loss
    epochs = record["epochs"] if isinstance(record.get("epochs"), list) else []
    for number, value in enumerate(epochs):
        found[f"epochs/{number}" if len(epochs) > 1 else "epochs"] = value
    infinite = {name for name, value in found.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: float(value) for name, value in found.items() if name in infinite or is_number(value)}


def _event(record: Mapping[str, Any]) -> str:
    details = [str(record[key]) for key in EVENT_DETAILS if record.get(key)]
    text = ": ".join([f"step {record.get('step', 0):,}: {record['event']}", *([", ".join(details)] if details else [])])
    return printable(text)  # a lone surrogate is no text for a tracker


def _unix_time(text: Any) -> float | None:
    try:
        found = datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None
    return found if 0 <= found <= MOST_SECONDS else None
