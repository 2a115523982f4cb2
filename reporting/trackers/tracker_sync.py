"""Send a run's metrics to an experiment tracker: new rows are appended.

If rows that were already sent have changed, for example after a restart from a checkpoint, all rows are sent again.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

import attrs
import numpy as np

from common.checks import integer, structured
from common.errors import BadInput
from common.files import is_folder, open_locked, replace_file, writing
from common.json_files import is_number, read_json
from common.output import note, show
from common.redaction import redacted_command
from common.text import printable
from reporting.run_history import EVENT_DETAILS, check_begun, clock
from training.checkpoints.run_record import RESOLVED
from training.supervision.run_lock import is_locked
from training.telemetry.curves import LOGGED
from training.telemetry.metrics_log import (
    METRICS,
    MOST_SECONDS,
    Metric,
    RunEvent,
    current_records,
    event_of,
    read_counted,
)

NUMBERS = (*LOGGED, Metric.VALIDATION_LOSS, Metric.ELAPSED_SECONDS, Metric.SKIPPED_STEPS)
IDENTITY_CHARACTERS = 16
ROWS = 1000  # number of rows that are written to a tracker at a time


@attrs.frozen(kw_only=True)
class TrackedRow:
    """All values of one step, and the events since the previous row.

    Events belong to the row after them, so that a late event does not change a row that was already sent.
    """

    step: int
    values: dict[str, float] = attrs.field(factory=dict)
    events: list[str] = attrs.field(factory=list)
    time: float | None = None  # Unix time of the step's last record


def tracked_rows(lines: Sequence[dict[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[TrackedRow]:
    """Return the rows of measured steps.

    `lines`: all lines of the metrics file; the cost is computed from them. `records`: the lines that are still part of
    the run, without steps that a later job repeated.
    """
    seconds, usd = clock(lines)
    rows: dict[int, TrackedRow] = {}
    events: list[str] = []  # not yet part of a row
    started = None  # Unix time of the last start, minus the seconds that the run had taken by then
    for record in records:
        unix_time = _unix_time(record.get("time"))
        elapsed = record.get(Metric.ELAPSED_SECONDS)
        if event_of(record) == RunEvent.START and unix_time is not None and elapsed is not None:
            started = unix_time - elapsed
        if unix_time is None and started is not None and elapsed is not None:
            unix_time = started + elapsed
        step = record.get("step", 0)
        if event_of(record) == RunEvent.START and rows:  # events after a job's last row belong to that row
            rows[max(rows)].events.extend(events)
            events = []
        if event_of(record):
            events.append(_event(record))
            continue
        row = rows.get(step)
        if row is None:
            row, events = TrackedRow(step=step, events=events), []
        row.values.update(_numbers(record))
        if elapsed is not None and usd is not None:
            row.values["dollars"] = float(np.interp(elapsed, seconds, usd))
        rows[row.step] = row if unix_time is None else attrs.evolve(row, time=unix_time)
    ordered = [rows[step] for step in sorted(rows)]
    if ordered:
        ordered[-1].events.extend(events)
    return ordered


@attrs.frozen(kw_only=True)
class TrackedRun:
    """What a tracker needs to know about a run."""

    directory: Path
    name: str  # for people
    project: str
    identity: str  # the same each time the run is sent
    version: int  # version of the tracker's data, as in Store.begin
    config: dict[str, Any]  # resolved.json; {} without that file


class Store(Protocol):
    """A tracker's data about one run. All methods raise BadInput if the tracker fails."""

    at_once: ClassVar[bool] = True  # whether rows are stored durably when `append` returns, not only after `close`

    @property
    def grows(self) -> bool:
        """Whether `append` can add to the existing data."""
        return True

    def fingerprint(self) -> Any:
        """Return a JSON value that depends on the amount of data and on the place where it is stored."""

    def begin(self, version: int) -> None:
        """Discard the data, because all rows will be sent again. `version` increases if earlier rows have changed."""

    def append(self, rows: Sequence[TrackedRow]) -> None:
        """Add rows. Their steps come after those of all stored rows."""

    def close(self) -> None:
        """Store the added rows durably. With `at_once`, there is nothing to do."""


# Each key is the name of a package, and also a value of `--to`. Each entry has the tested version of the package, our
# module, and the class in this module that implements Store.
TRACKERS = {
    "tensorboard": ("2.21.0", "reporting.trackers.tensorboard_events", "TensorBoardEvents"),
    "wandb": ("0.31.0", "reporting.trackers.wandb_run", "WandbRun"),
    "trackio": ("0.43.0", "reporting.trackers.trackio_run", "TrackioRun"),
}


@attrs.frozen(kw_only=True)
class Progress:
    """The state file: which rows a tracker has."""

    identity: str = ""  # of the run
    version: int = attrs.field(default=0, validator=integer(0))
    rows: int = attrs.field(default=0, validator=integer(0))
    digest: str = ""  # sha256 of these rows
    held: Any = None  # Store.fingerprint after these rows


class TrackerSync:
    """Send a run to one tracker. Each call of `advance` sends the new rows.

    A lock makes sure that only one process sends a run to a tracker.
    """

    def __init__(self, directory: Path, name: str, project: str):
        """Raise BadInput if the run or the tracker's package is missing, or if another process is sending the run."""
        if not is_folder(directory):
            raise BadInput(f"{directory}: no such run directory; pass a folder that has a {METRICS}")
        self._directory, self._project, self._open = directory, project, store_of(name)
        self._state = directory / f".tracker-{name}.json"
        contention = f"{directory}: another report.py --to {name} is sending this run; wait until it has finished"
        self._lock = open_locked(directory / f".tracker-{name}.lock", contention)
        self._store: Store | None = None
        self._progress = Progress()
        try:
            if self._state.is_file():
                self._progress = structured(read_json(self._state), Progress)
        except (BadInput, ValueError) as error:
            show(note(f"{self._state}: damaged, so all data is sent again: {error}"))

    def advance(self) -> tuple[int, int]:
        """Send new rows, and return their number and the number of all rows.

        Raise NotBegun if the run has no metrics, and BadInput if the tracker fails.
        """
        check_begun(self._directory)
        running = is_locked(self._directory)  # checked first: without a running job, the lines are complete
        lines = read_counted(self._directory).records
        rows = tracked_rows(lines, current_records(lines))
        rows = rows[:-1] if running else rows  # more records of the newest step may follow, so it is sent later
        if not rows:
            return 0, 0
        if self._store is None:
            self._run = self._describe(lines)
            self._store = self._open(self._run)
        stored = self._stored_rows(self._store, rows)
        digest = _add(hashlib.sha256(), rows[:stored])
        for start in range(stored, len(rows), ROWS):
            stop = min(start + ROWS, len(rows))
            self._store.append(rows[start:stop])
            _add(digest, rows[start:stop])
            fingerprint = self._store.fingerprint()
            self._progress = attrs.evolve(self._progress, rows=stop, digest=digest.hexdigest(), held=fingerprint)
            if self._store.at_once:
                self._write_state()
        return len(rows) - stored, len(rows)

    def close(self) -> None:
        """Store the sent rows durably. Raise BadInput if the tracker fails. A second call does nothing."""
        store, self._store = self._store, None
        try:
            if store is not None:
                store.close()
                if not store.at_once:  # with at_once, the state was written after each successful append
                    self._progress = attrs.evolve(self._progress, held=store.fingerprint())
                    self._write_state()
        finally:
            self._lock.close()

    def _stored_rows(self, store: Store, rows: Sequence[TrackedRow]) -> int:
        """Return the number of rows that the tracker already has.

        If the tracker's rows differ from `rows`, discard the tracker's data and return 0.
        """
        progress = self._progress
        same_run = progress.identity == self._run.identity
        digest = _add(hashlib.sha256(), rows[: progress.rows]).hexdigest()
        same_rows = same_run and digest == progress.digest and progress.rows <= len(rows)
        if same_rows and store.fingerprint() == progress.held and (progress.rows == len(rows) or store.grows):
            return progress.rows
        changed = same_run and not same_rows and progress.rows > 0
        version = (progress.version if same_run else 0) + changed
        self._progress = Progress(identity=self._run.identity, version=version)
        # First write the state: if the process is killed before `begin` ends, the data counts as incomplete.
        self._write_state()
        store.begin(version)
        return 0

    def _write_state(self) -> None:
        with writing(self._state):
            replace_file(self._state, json.dumps(attrs.asdict(self._progress)))

    def _describe(self, lines: Sequence[dict[str, Any]]) -> TrackedRun:
        started = next((str(line.get("time")) for line in lines if event_of(line) == RunEvent.START), "")
        name = self._directory.resolve().name
        digest = hashlib.sha256(f"{name} {started}".encode(errors="backslashreplace")).hexdigest()
        record, identity = self._directory / RESOLVED, digest[:IDENTITY_CHARACTERS]
        return TrackedRun(
            directory=self._directory,
            name=name,
            project=self._project,
            identity=identity,
            version=self._progress.version if self._progress.identity == identity else 0,
            config=_without_secrets(read_json(record)) if record.is_file() else {},
        )


def _without_secrets(record: dict[str, Any]) -> dict[str, Any]:
    """Return a run's record without the secrets in its command line, which older versions did not remove."""
    words = record.get("command")
    return record | {"command": redacted_command([*map(str, words)])} if isinstance(words, list) else record


def store_of(name: str) -> Callable[[TrackedRun], Store]:
    """Return the class of a tracker's store. Raise BadInput if the tracker's package is missing."""
    version, module, kind = TRACKERS[name]
    try:
        import_module(name)
    except ImportError as error:
        raise BadInput(f"--to {name}: needs the package {name}: pip install {name}=={version}") from error
    return getattr(import_module(module), kind)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the measured values of a record. Unknown values, which are null in the file, are left out."""
    values: dict[str, Any] = {name: record.get(name) for name in NUMBERS}
    for dataset, loss in record.get(Metric.VALIDATION_LOSSES, {}).items():
        values[f"{Metric.VALIDATION_LOSS}/{printable(dataset)}"] = loss
    epochs = record[Metric.EPOCHS] if isinstance(record.get(Metric.EPOCHS), list) else []
    for number, epoch in enumerate(epochs):
        values[f"{Metric.EPOCHS}/{number}" if len(epochs) > 1 else Metric.EPOCHS] = epoch
    infinite = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: float(value) for name, value in values.items() if name in infinite or is_number(value)}


def _event(record: Mapping[str, Any]) -> str:
    details = ", ".join(record[key] for key in EVENT_DETAILS if isinstance(record.get(key), str))
    text = f"step {record.get('step', 0):,}: {event_of(record)}" + (f": {details}" if details else "")
    return printable(text)  # a tracker cannot store a lone surrogate


def _unix_time(text: Any) -> float | None:
    try:
        seconds = datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds <= MOST_SECONDS else None


def _add(digest: "hashlib._Hash", rows: Sequence[TrackedRow]) -> "hashlib._Hash":
    for row in rows:
        digest.update(repr((row.step, row.values, row.events)).encode())
    return digest
