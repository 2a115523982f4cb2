"""`metrics.jsonl`: append-only, one JSON object a line; everything shown is drawn from it.

Lines with `train_loss` or `validation_loss` are measurements after `step` updates; lines with `event` tell what
happened to the run. A run that resumes from step N starts with an event "start" at N: what an earlier process had
logged beyond N was not kept, and `read_metrics` leaves it out.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"  # what evaluate.py measured
ANSWERS = "answers"  # folder: what a fine-tuned copy answered


class MetricsLog:
    """Appends records; each is in the file when `write` returns, unless the disk is full."""

    def __init__(self, directory: Path):
        path = directory / METRICS
        torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("ab", buffering=0)
        self._pending = b"\n" if torn else b""  # the process before was killed in the middle of a line

    def write(self, record: dict[str, Any]) -> None:
        """Append one record. What a full disk does not take is kept, and written with a later one."""
        self._pending += json.dumps(record).encode() + b"\n"
        self._flush()

    def close(self) -> None:
        """Write what is left, if it can be, and close the file."""
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError:
            return


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the records that belong to the run as it stands, in order; torn lines are skipped."""
    records: list[dict[str, Any]] = []
    for record in read_lines(directory):
        if record.get("event") == "start":
            records = [earlier for earlier in records if earlier.get("step", 0) <= record["step"]]
        records.append(record)
    return records


def read_lines(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield every record that a job has written, superseded ones as well; torn lines are skipped."""
    path = directory / METRICS
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            yield json.loads(line)
        except ValueError:
            continue
