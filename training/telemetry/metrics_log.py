"""Metrics log, `metrics.jsonl`: append-only, one JSON object per line; the source of every chart and report.

Lines with `train_loss` or `validation_loss` are measurements after `step` updates; lines with `event` are events of
the run. A job that resumes from step N begins with an event "start" at N: `read_metrics` leaves out what earlier jobs
logged beyond N.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common.errors import LARGEST_INTEGER
from common.files import writing
from common.json_files import JsonLines, JsonLog, read_json_lines
from model.checks import is_number

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"  # what evaluate.py measured
SAMPLES = "samples.jsonl"  # what report.py generated and measured at checkpoints
REPORT = "report.html"  # what it draws
SETTINGS_CHANGED = "settings-changed"  # event: a job resumed the run with another value of a key
ANSWERS = "answers"  # folder: what a fine-tuned copy answered

_OPTIONAL = ("grad_norm", "price_per_hour")  # may be null
_NUMBERS = ("learning_rate", "elapsed_seconds", *_OPTIONAL)
_LOSSES = ("train_loss", "validation_loss")  # nan as well
_LEDGERS = {"ledger": ("run_ledger", "elapsed_seconds"), "run_ledger": ("elapsed_seconds",)}  # and what goes with them


class MetricsLog:
    """Appends records; each is in the file when `write` returns. `say` gets a line where writing fails."""

    def __init__(self, directory: Path, say: Callable[[str], None] = print):
        """Open it. Raises BadInput where that cannot be done, or for what is no regular file."""
        with writing(directory / METRICS):
            self._log = JsonLog(directory / METRICS)
        self._say = say
        self._failing = False

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, or keep it in memory until a later one can be written."""
        try:
            self._log.append(record)
        except OSError as error:
            if not self._failing:
                self._say(
                    f"WARNING: {self._log.path}: cannot be written: {error.strerror}; its lines are kept in memory and "
                    "tried again with each new one"
                )
            self._failing = True
            return
        if self._failing:
            self._failing = False
            self._say(f"{self._log.path}: written again, with the lines that were kept")

    def close(self) -> None:
        """Write the lines kept in memory and close the file; print how many are lost."""
        try:
            self._log.flush()
        except OSError as error:
            reason = error.strerror
        else:
            reason = "too many to keep in memory"
        if lost := self._log.unwritten:
            self._say(f"WARNING: {self._log.path}: {lost:,} lines could not be written and are lost: {reason}")
        self._log.close()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the records that belong to the run as it stands, in order. Raises BadInput as `read_lines` does."""
    return current_records(read_lines(directory))


def current_records(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of all records that belong to the run as it stands, in order."""
    records: list[dict[str, Any]] = []
    for record in lines:
        if record.get("event") == "start":
            step = record["step"]  # a job repeats the changes at the step where it begins
            records = [one for one in records if one.get("step", 0) < step + (one.get("event") != SETTINGS_CHANGED)]
        records.append(record)
    return records


def read_lines(directory: Path) -> list[dict[str, Any]]:
    """Return every record that a job has written, superseded ones as well; unreadable lines are skipped.

    Raises BadInput when the file cannot be read at all.
    """
    return read_counted(directory).records


def read_counted(directory: Path) -> JsonLines:
    """Return the records of `read_lines`, and the number of lines that it skips. Raises BadInput as it does."""
    lines = read_json_lines(directory / METRICS)
    sound = list(filter(_is_sound, lines.records))
    return lines._replace(records=sound, unreadable=lines.unreadable + len(lines.records) - len(sound))


def read_starts(directory: Path) -> list[int]:
    """Return the step from which each job has started, in order. Raises BadInput as `read_lines` does."""
    lines = read_json_lines(directory / METRICS, containing=b'"start"').records
    return [record["step"] for record in lines if record.get("event") == "start" and _is_sound(record)]


def _is_sound(record: dict[str, Any]) -> bool:
    """Tell whether a record has the fields that its readers rely on, with their types."""
    places = any(key in record for key in _LOSSES) or record.get("event") == "start"
    step = record.get("step", None if places else 0)
    if type(step) is not int or not 0 <= step <= LARGEST_INTEGER or not isinstance(record.get("event", ""), str):
        return False
    if not all(key in record for first, needed in _LEDGERS.items() if first in record for key in needed):
        return False
    return (
        all(_is_loss(record[key]) for key in _LOSSES if key in record)
        and _are_losses(record.get("validation_losses", {}))
        and all(_is_value(record[key], key) for key in _NUMBERS if key in record)
        and all(_is_ledger(record[key]) for key in ("ledger", "run_ledger") if key in record)
    )


def _is_loss(value: Any) -> bool:
    return is_number(value) or (type(value) is float and not math.isfinite(value))


def _are_losses(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_loss, value.values()))


def _is_value(value: Any, key: str) -> bool:
    return is_number(value) or (value is None and key in _OPTIONAL)


def _is_ledger(value: Any) -> bool:
    return isinstance(value, dict) and "compile" in value and all(map(is_number, value.values()))
