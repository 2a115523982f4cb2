"""History of a run, read once from its files: curves, their axes, events, time, cost and state."""

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
# Events that are marked in the curves, and the words for them.
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
ENDS = {  # words for each of STATES
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
    text: str  # details for people


@attrs.frozen(kw_only=True, eq=False)
class RunHistory:
    """History of a run, from the files of its directory."""

    name: str
    model: ModelConfig  # this and `train` as the run was trained; as they are now before the first job
    train: TrainConfig
    curves: dict[str, Curve]
    axes: dict[str, Curve]  # those of AXES that are known, as functions of the step
    marks: list[Mark]
    state: str  # complete, running, stopped, ...
    ledger: dict[str, float]  # seconds of the whole run by part; empty before the first job has ended
    ledger_usd: float | None  # price of these seconds
    hours: float
    usd: float | None  # None without a price
    record: RunRecord | None  # None where `resolved.json` is missing or damaged
    job: JobRecord  # of the last job; empty where the record is None
    used: TrainedOn  # by all jobs
    bits_per_nat: float | None  # bits per byte of a loss of one nat per token; None where that is unknown
    notes: list[Notice]  # on lines and files that are left out
    compared: str | None = None  # the training loss with those of the recipe, in words

    @property
    def step(self) -> int:
        return int(max((curve.steps[-1] for curve in self.curves.values()), default=0))

    def along(self, axis: str, steps: np.ndarray) -> np.ndarray:
        """Return where steps lie on an axis, (n,)."""
        return np.interp(steps, self.axes[axis].steps, self.axes[axis].values)


class NotBegun(BadInput):
    """A run directory without a measurement."""


def check_begun(directory: Path) -> None:
    """Raise NotBegun where a run has no metrics yet."""
    if not (directory / METRICS).exists():
        raise NotBegun(f"{directory / METRICS}: no such file: the run has not begun; train it first")


def read_history(directory: Path) -> RunHistory:
    """Read a run directory. Raises BadInput where it is none, NotBegun where it holds no measurements yet."""
    archived = directory.absolute().parent.name == ARCHIVE
    run = load_run(directory.parents[1] if archived else directory, ())
    check_begun(directory)
    found = read_counted(directory)
    lines, records = found.records, current_records(found.records)
    curves = run_curves(records)
    if not curves:
        raise NotBegun(f"{directory / METRICS}: holds no measurement yet; wait for the first logged step")
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
            job.environment or JobEnvironment(),  # the commit of the record is told without a machine as well
            None if record is None else record.git_commit,
        ),
        bits_per_nat=_bits_per_nat(job.token_directories, record),
        notes=[*found.notes(growing=is_locked(directory)), *notes],
        compared=str(compare(directory, record, curves).line) if record and (directory / REFERENCE).exists() else None,
    )


def read_resolved(directory: Path) -> tuple[RunRecord | None, JobRecord, list[Notice]]:
    """Return a run's `resolved.json`; a damaged one is unknown, and a note says so."""
    path = directory / RESOLVED
    try:
        if (record := read_record(directory)) is None:
            return None, JobRecord(), []
        record.network_config()  # a network that this version cannot build is refused here
        job = read_job(directory)
        job.check()
        if not all(is_number(source["tokens"]) and is_number(source["epochs"] or 0) for source in record.sources or []):
            raise ValueError("sources: wanted numbers")
    except (BadInput, ValueError, TypeError, LookupError) as error:
        return None, JobRecord(), [note(f"{path}: damaged or edited, and left out: {error}")]
    return record, job, []


def run_names(directories: Sequence[Path]) -> list[str]:
    """Return the names of runs for people; of several with one name, their paths."""
    parts = [directory.resolve().parts for directory in directories]
    names = ["/".join(one[-3 if one[-2:-1] == (ARCHIVE,) else -1 :]) for one in parts]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, directories, strict=True)]


def clock(lines: Sequence[dict[str, Any]], price: float | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return seconds and dollars, both (n,), over all lines, lost work too; `price`: where jobs have recorded none."""
    seconds, usd, known = [0.0], [0.0], last_price(lines, price)
    for reached, paid in priced_seconds(lines, known):
        usd.append(usd[-1] + (time_cost(reached - seconds[-1], paid) or 0.0))
        seconds.append(reached)
    return np.array(seconds), None if known is None else np.array(usd)


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
    """Yield the marks of a run's records; `lines`: of all jobs, of which the first one is no restart."""
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
    """Return the state of a run: as its last job wrote when it ended, or running, or killed."""
    last = next((record for record in reversed(records) if event_of(record) in STATES), None)
    ended = read_exit(directory)
    if is_locked(directory) and (ended is None or not ended.final):  # written before the job's last chart is drawn
        return "running"
    outcome = "killed" if ended is None else ended.outcome
    if last is None or event_of(last) == RunEvent.START:
        return "complete" if outcome == "done" else outcome
    problem = last.get(Detail.PROBLEM) or last.get(Detail.REASON)
    return ENDS[event_of(last)] + (f": {problem}" if problem else "")


def _bits_per_nat(directories: Sequence[Path], record: RunRecord | None) -> float | None:
    """Return the bits per byte of text of one nat per token; None where the bytes are not at hand, or not all count.

    They are not at hand where the directory holds other tokens now than those that the run read.
    """
    if record is None or len(directories) != 1:
        return None
    try:
        streams = record.train_streams or [StreamRecord(tokens=None, sha256=[])]  # older records have none
        manifest = manifest_of(streams[0], directories[0])
    except (BadInput, ValueError):  # damaged, or an impossible path
        return None
    if manifest is None or manifest.rows is not None or not manifest.text_bytes or manifest.tokens <= 0:
        return None
    return manifest.tokens / manifest.text_bytes / math.log(2)
