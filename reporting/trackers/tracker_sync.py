"""Replay of a run's metrics to an experiment tracker: new rows appended, or all anew where sent ones differ."""

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
ROWS = 1000  # stored for good at a time


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
        elapsed = record.get(Metric.ELAPSED_SECONDS)
        if event_of(record) == RunEvent.START and own is not None and elapsed is not None:
            started = own - elapsed
        if own is None and started is not None and elapsed is not None:
            own = started + elapsed
        step = record.get("step", 0)
        if event_of(record) == RunEvent.START and rows:  # what the job before has left stays with its last row
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
        rows[row.step] = row if own is None else attrs.evolve(row, time=own)
    ordered = [rows[step] for step in sorted(rows)]
    if ordered:
        ordered[-1].events.extend(events)
    return ordered


@attrs.frozen(kw_only=True)
class TrackedRun:
    directory: Path
    name: str  # for people
    project: str
    identity: str  # the same in every replay of the run
    version: int  # of the data that the tracker has, as in Store.begin
    config: dict[str, Any]  # resolved.json; {} where there is none


class Store(Protocol):
    """A tracker's data of one run. Methods raise BadInput."""

    at_once: ClassVar[bool] = True  # rows are stored for good when `append` returns; else when `close` does

    @property
    def grows(self) -> bool:
        """True where `append` can add to the data that is there."""
        return True

    def held(self) -> Any:
        """Return a JSON value that differs for different amounts of data, and for data in another place."""

    def begin(self, version: int) -> None:
        """Discard the data, to be written anew; `version` rises where rows that were there have changed."""

    def append(self, rows: Sequence[TrackedRow]) -> None:
        """Take rows of later steps."""

    def close(self) -> None:
        """Store for good what was taken: nothing to do where rows are stored at once."""


TRACKERS = {  # by package, also a choice of report.py --to: the tested version, module and class of the Store
    "tensorboard": ("2.21.0", "reporting.trackers.tensorboard_events", "TensorBoardEvents"),
    "wandb": ("0.31.0", "reporting.trackers.wandb_run", "WandbRun"),
    "trackio": ("0.43.0", "reporting.trackers.trackio_run", "TrackioRun"),
}


@attrs.frozen(kw_only=True)
class Progress:
    """State file: the rows that a tracker holds."""

    identity: str = ""  # of the run
    version: int = attrs.field(default=0, validator=integer(0))
    rows: int = attrs.field(default=0, validator=integer(0))
    digest: str = ""  # sha256 of these rows
    held: Any = None  # by the tracker's own data


class TrackerSync:
    """Sends a run to one tracker. Each call of `advance` sends what is new; one replay of a run at a time."""

    def __init__(self, directory: Path, name: str, project: str):
        """Raises BadInput where the tracker's package or the run is missing, or another replay is at work."""
        if not is_folder(directory):
            raise BadInput(f"{directory}: no such run directory; wanted a folder with {METRICS}")
        self._directory, self._project, self._open = directory, project, store_of(name)
        self._state = directory / f".tracker-{name}.json"
        contention = f"{directory}: another report.py --to {name} is at work; wait for it"
        self._lock = open_locked(directory / f".tracker-{name}.lock", contention)
        self._store: Store | None = None
        self._progress = Progress()
        try:
            if self._state.is_file():
                self._progress = structured(read_json(self._state), Progress)
        except (BadInput, ValueError) as error:
            show(note(f"{self._state}: damaged, so the data is sent anew: {error}"))

    def advance(self) -> tuple[int, int]:
        """Send new rows; return how many, and the total. Raises NotBegun without metrics, BadInput for the tracker."""
        check_begun(self._directory)
        running = is_locked(self._directory)  # before the look: what a job writes last is sent
        lines = read_counted(self._directory).records
        rows = tracked_rows(lines, current_records(lines))
        rows = rows[:-1] if running else rows  # the newest step waits for its other records
        if not rows:
            return 0, 0
        if self._store is None:
            self._run = self._describe(lines)
            self._store = self._open(self._run)
        begun = self._begun(self._store, rows)
        digest = _add(hashlib.sha256(), rows[:begun])
        for start in range(begun, len(rows), ROWS):
            stop = min(start + ROWS, len(rows))
            self._store.append(rows[start:stop])
            _add(digest, rows[start:stop])
            held = self._store.held()
            self._progress = attrs.evolve(self._progress, rows=stop, digest=digest.hexdigest(), held=held)
            if self._store.at_once:
                self._write_state()
        return len(rows) - begun, len(rows)

    def close(self) -> None:
        """Store for good what was sent. Raises BadInput where the tracker fails; a second call does nothing."""
        store, self._store = self._store, None
        try:
            if store is not None:
                store.close()
                if not store.at_once:  # else the state is that of the last append that succeeded
                    self._progress = attrs.evolve(self._progress, held=store.held())
                    self._write_state()
        finally:
            self._lock.close()

    def _begun(self, store: Store, rows: Sequence[TrackedRow]) -> int:
        """Return how many rows the tracker holds, after it has discarded its data where they are others."""
        before = self._progress
        same_run = before.identity == self._run.identity
        digest = _add(hashlib.sha256(), rows[: before.rows]).hexdigest()
        same = same_run and digest == before.digest and before.rows <= len(rows)
        if same and store.held() == before.held and (before.rows == len(rows) or store.grows):
            return before.rows
        changed = same_run and not same and before.rows > 0
        version = (before.version if same_run else 0) + changed
        self._progress = Progress(identity=self._run.identity, version=version)
        self._write_state()  # first: after a kill the data counts as incomplete
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
    """Return a run's record whose command line has no secrets: older versions recorded it as it was."""
    words = record.get("command")
    return record | {"command": redacted_command([*map(str, words)])} if isinstance(words, list) else record


def store_of(name: str) -> Callable[[TrackedRun], Store]:
    """Return the function that opens a tracker's store of a run. Raises BadInput where its package is missing."""
    version, module, kind = TRACKERS[name]
    try:
        import_module(name)
    except ImportError as error:
        raise BadInput(f"--to {name}: needs {name}: pip install {name}=={version}") from error
    return getattr(import_module(module), kind)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the measured values; unknown ones, null in the file, are left out."""
    found: dict[str, Any] = {name: record.get(name) for name in NUMBERS}
    for dataset, loss in record.get(Metric.VALIDATION_LOSSES, {}).items():
        found[f"{Metric.VALIDATION_LOSS}/{printable(dataset)}"] = loss
    epochs = record[Metric.EPOCHS] if isinstance(record.get(Metric.EPOCHS), list) else []
    for number, value in enumerate(epochs):
        found[f"{Metric.EPOCHS}/{number}" if len(epochs) > 1 else Metric.EPOCHS] = value
    infinite = {name for name, value in found.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: float(value) for name, value in found.items() if name in infinite or is_number(value)}


def _event(record: Mapping[str, Any]) -> str:
    details = ", ".join(record[key] for key in EVENT_DETAILS if isinstance(record.get(key), str))
    text = f"step {record.get('step', 0):,}: {event_of(record)}" + (f": {details}" if details else "")
    return printable(text)  # a lone surrogate is no text for a tracker


def _unix_time(text: Any) -> float | None:
    try:
        found = datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None
    return found if 0 <= found <= MOST_SECONDS else None


def _add(digest: "hashlib._Hash", rows: Sequence[TrackedRow]) -> "hashlib._Hash":
    for row in rows:
        digest.update(repr((row.step, row.values, row.events)).encode())
    return digest
