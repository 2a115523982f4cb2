"""The history of a run, read once from its files: curves and their axes, events, time, cost and state."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.errors import BadInput
from common.json_files import is_number
from common.output import Notice, note
from common.text import time_cost
from evaluation.shared.machines import TrainedOn, trained_on
from model.config import ModelConfig
from training.checkpoints.directory import ARCHIVE
from training.checkpoints.run_record import (
    RESOLVED,
    JobEnvironment,
    JobRecord,
    RunRecord,
    StreamRecord,
    manifest_of,
    read_job,
    read_record,
)
from training.config.train_config import TrainConfig, load_run
from training.reference import compare
from training.supervision.run_lock import is_locked, read_exit
from training.telemetry.curves import Curve, curve_of, run_curves
from training.telemetry.metrics_log import (
    METRICS,
    REFERENCE,
    STATES,
    Detail,
    Metric,
    RunEvent,
    current_records,
    event_of,
    last_price,
    priced_seconds,
    read_counted,
)

AXES = ("steps", "tokens", "hours", "dollars")
# The events that are marked in the charts, and what the page calls them.
MARKED = {
    RunEvent.START: "restart",
    RunEvent.SPIKE_SKIPPED: "update skipped",
    RunEvent.CHECKPOINT_FAILED: "save failed",
    RunEvent.UPLOAD_FAILED: "upload failed",
    RunEvent.NUMERICS_DRIFT: "numerics changed",
    RunEvent.SETTINGS_CHANGED: "settings changed",
    RunEvent.STOPPED: "stopped",
    RunEvent.DIVERGED: "diverged",
}
EVENT_DETAILS = (Detail.PROBLEM, Detail.REASON, Detail.WHO, Detail.NAME)
ENDS = {  # what the page calls each of STATES
    RunEvent.START: "",
    RunEvent.END: "complete",
    RunEvent.PAUSE: "paused",
    RunEvent.STOPPED: "stopped",
    RunEvent.DIVERGED: "diverged",
}


@attrs.frozen
class Mark:
    step: int
    kind: str  # one of the words in MARKED
    text: str  # details for the reader of the page


@attrs.frozen(kw_only=True, eq=False)
class RunHistory:
    """What the files of a run directory say about a run, up to the moment when the files were read."""

    name: str
    # The configuration that the run was trained with; before the first job, the configuration in the run's files.
    model: ModelConfig
    train: TrainConfig
    curves: dict[str, Curve]
    axes: dict[str, Curve]  # those of AXES that the run has recorded, as functions of the step
    marks: list[Mark]
    state: str  # complete, running, stopped, ...
    ledger: dict[str, float]  # seconds by part, over the whole run; empty until the first job has ended
    ledger_usd: float | None  # price of these seconds
    hours: float
    usd: float | None  # None if the price is unknown
    record: RunRecord | None  # None if `resolved.json` is missing or damaged
    job: JobRecord  # the last job; empty if `record` is None
    used: TrainedOn  # machines, software and commits of all jobs
    bits_per_nat: float | None  # one nat per token is this number of bits per byte; None if unknown
    notes: list[Notice]  # notes on lines and files that could not be read
    compared: str | None = None  # a sentence that compares the training loss with the recipe's reference

    @property
    def step(self) -> int:
        return int(max((curve.steps[-1] for curve in self.curves.values()), default=0))

    def along(self, axis: str, steps: np.ndarray) -> np.ndarray:
        """Return the positions of steps on an axis, (n,)."""
        return np.interp(steps, self.axes[axis].steps, self.axes[axis].values)


class NotBegun(BadInput):
    """The run directory has no measurements yet."""


def check_begun(directory: Path) -> None:
    """Raise NotBegun if a run has no metrics yet."""
    if not (directory / METRICS).exists():
        raise NotBegun(f"{directory / METRICS}: no such file: the run has not begun; train it first")


def read_history(directory: Path) -> RunHistory:
    """Read a run directory. Raise BadInput for any other directory, and NotBegun if there are no measurements yet."""
    archived = directory.absolute().parent.name == ARCHIVE
    run = load_run(directory.parents[1] if archived else directory, ())
    check_begun(directory)
    log = read_counted(directory)
    lines, records = log.records, current_records(log.records)
    curves = run_curves(records)
    if not curves:
        raise NotBegun(f"{directory / METRICS}: has no measurements yet; wait for the first logged step")
    record, job, notes = read_resolved(directory)
    model, train = (run.model, run.train) if record is None else (record.model, record.train)
    batch = train.batch.global_batch_size or train.batch.microbatch_size if record is None else record.global_batch_size
    seconds, usd = clock(lines, job.price_per_hour)
    ledger = next((line for line in reversed(lines) if Metric.RUN_LEDGER in line), None)
    ledger_usd = None
    if usd is not None and ledger is not None:
        ledger_usd = float(np.interp(ledger[Metric.ELAPSED_SECONDS], seconds, usd))
    return RunHistory(
        name=directory.resolve().name,
        model=model,
        train=train,
        curves=curves,
        axes=_axes(records, (seconds, usd), batch * model.context_length),
        marks=list(_marks(records, lines)),
        state=_state(directory, records),
        ledger={} if ledger is None else ledger[Metric.RUN_LEDGER],
        ledger_usd=ledger_usd,
        hours=float(seconds[-1]) / 3600,
        usd=None if usd is None else float(usd[-1]),
        record=record,
        job=job,
        used=trained_on(
            records,
            records[-1].get("step", 0) + 1,
            job.environment or JobEnvironment(),  # so that the commit is reported even if no machine was recorded
            None if record is None else record.git_commit,
        ),
        bits_per_nat=_bits_per_nat(job.token_directories, record),
        notes=[*log.notes(growing=is_locked(directory)), *notes],
        compared=str(compare(directory, record, curves).line) if record and (directory / REFERENCE).exists() else None,
    )


def read_resolved(directory: Path) -> tuple[RunRecord | None, JobRecord, list[Notice]]:
    """Return a run's `resolved.json`, its last job, and notes. A damaged file counts as missing, and a note says so."""
    path = directory / RESOLVED
    try:
        if (record := read_record(directory)) is None:
            return None, JobRecord(), []
        record.network_config()  # raises an error for a network that this version cannot build
        job = read_job(directory)
        job.check()
        if not all(is_number(source["tokens"]) and is_number(source["epochs"] or 0) for source in record.sources or []):
            raise ValueError("sources: tokens and epochs must be numbers")
    except (BadInput, ValueError, TypeError, LookupError) as error:
        return None, JobRecord(), [note(f"{path}: damaged or edited, so it is not shown: {error}")]
    return record, job, []


def run_names(directories: Sequence[Path]) -> list[str]:
    """Return a short name for each run: the last folder of its path, or the whole path if that folder is not unique."""
    paths = [directory.resolve().parts for directory in directories]
    names = ["/".join(parts[-3 if parts[-2:-1] == (ARCHIVE,) else -1 :]) for parts in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, directories, strict=True)]


def clock(lines: Sequence[dict[str, Any]], price: float | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a run's elapsed seconds and its dollars over all lines of its metrics, as two arrays (n,).

    Work that was lost in a crash is included. `price`, in dollars per hour, is used for jobs that recorded no price.
    Without any price, the dollars are None.
    """
    seconds, usd, last_known_price = [0.0], [0.0], last_price(lines, price)
    for elapsed, hourly_price in priced_seconds(lines, last_known_price):
        usd.append(usd[-1] + (time_cost(elapsed - seconds[-1], hourly_price) or 0.0))
        seconds.append(elapsed)
    return np.array(seconds), None if last_known_price is None else np.array(usd)


def _axes(
    records: Sequence[dict[str, Any]], spent: tuple[np.ndarray, np.ndarray | None], tokens_per_step: int
) -> dict[str, Curve]:
    timed = [record for record in records if Metric.ELAPSED_SECONDS in record and "step" in record]
    elapsed = curve_of(sorted(timed, key=lambda record: record["step"]), Metric.ELAPSED_SECONDS)
    ends = np.array([0.0, max((record.get("step", 0) for record in records), default=0) or 1.0])
    axes = {"steps": Curve(ends, ends), "tokens": Curve(ends, ends * tokens_per_step)}
    if timed:
        axes["hours"] = Curve(elapsed.steps, np.maximum.accumulate(elapsed.values) / 3600)
        if spent[1] is not None:
            axes["dollars"] = Curve(elapsed.steps, np.interp(axes["hours"].values * 3600, spent[0], spent[1]))
    return axes


def _marks(records: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]) -> Iterator[Mark]:
    """Yield the marks of a run's records. `lines`: the records of all jobs. The run's first start gets no mark."""
    first = next((record for record in lines if event_of(record) == RunEvent.START), None)
    for record in records:
        event = event_of(record)
        if event not in MARKED or record is first:
            continue
        details = [record[key] for key in EVENT_DETAILS if isinstance(record.get(key), str)]
        if event == RunEvent.START:
            world_size, commit = record.get(Detail.WORLD_SIZE, "?"), record.get(Detail.COMMIT) or "unknown"
            details = [f"world size {world_size}, commit {commit}"]
        if event == RunEvent.SETTINGS_CHANGED:
            old, new = (json.dumps(record.get(key)) for key in (Detail.OLD, Detail.NEW))
            details = [f"{record.get(Detail.KEY)} {old} -> {new}"]
        text = ", ".join([*details, str(record.get("time", ""))]).strip(", ")
        yield Mark(record.get("step", 0), MARKED[event], text)


def _state(directory: Path, records: Sequence[dict[str, Any]]) -> str:
    """Return the state of a run: running, killed, or the state that its last job recorded when it ended."""
    last = next((record for record in reversed(records) if event_of(record) in STATES), None)
    ended = read_exit(directory)
    # A job writes its final exit record before it draws its last chart and releases the lock.
    if is_locked(directory) and (ended is None or not ended.final):
        return "running"
    outcome = "killed" if ended is None else ended.outcome
    if last is None or event_of(last) == RunEvent.START:
        return "complete" if outcome == "done" else outcome
    problem = last.get(Detail.PROBLEM) or last.get(Detail.REASON)
    return ENDS[event_of(last)] + (f": {problem}" if problem else "")


def _bits_per_nat(directories: Sequence[Path], record: RunRecord | None) -> float | None:
    """Return the number of bits per byte of text that corresponds to one nat per token.

    Return None if the number of bytes is unknown, for example because the directory no longer contains the tokens that
    the run read, or if some of the tokens do not add to the loss.
    """
    if record is None or len(directories) != 1:
        return None
    try:
        streams = record.train_streams or [StreamRecord(tokens=None, sha256=[])]  # older records list no streams
        manifest = manifest_of(streams[0], directories[0])
    except (BadInput, ValueError):  # a damaged manifest, or an impossible path
        return None
    if manifest is None or manifest.rows is not None or not manifest.text_bytes or manifest.tokens <= 0:
        return None
    return manifest.tokens / manifest.text_bytes / math.log(2)
