"""History of a run, read once from its files: curves, their axes, events, time, cost and state."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.errors import BadInput
from common.json_files import is_number
from model.config import ModelConfig
from reporting.recorded_run import RecordedRun, bits_per_nat, read_recorded
from training.supervision.exit_record import read_exit
from training.supervision.run_lock import is_locked
from training.telemetry.job_prices import last_price, priced_seconds
from training.telemetry.metrics_log import METRICS, SETTINGS_CHANGED, current_records, read_counted

AXES = {"steps": "steps", "tokens": "tokens", "hours": "hours", "dollars": "dollars"}
LOGGED = ("train_loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "peak_memory_bytes")
# Events that are marked in the curves, and the words for them.
MARKED = {
    "start": "restart",
    "spike-skipped": "update skipped",
    "checkpoint-failed": "save failed",
    "upload-failed": "upload failed",
    "straggler": "slow rank",
    "numerics-drift": "numerics changed",
    SETTINGS_CHANGED: "settings changed",
    "stopped": "stopped",
    "diverged": "diverged",
}


@attrs.frozen(eq=False)
class Curve:
    """Values over steps, both float64 (n,); an unknown value is NaN."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float:
        """The last value."""
        return float(self.values[-1])


@attrs.frozen
class Mark:
    """An event to be shown in the curves."""

    step: int
    kind: str  # one of the words in MARKED
    text: str  # details for people


@attrs.frozen(kw_only=True, eq=False)
class RunHistory:
    """History of a run, from the files of its directory."""

    name: str
    model: ModelConfig  # this and `train` as the run was trained; as they are now before the first job
    train: dict[str, Any]  # keys of train.json, with the version's defaults
    curves: dict[str, Curve]  # those of LOGGED that were logged, "validation_loss", and those of further datasets
    axes: dict[str, Curve]  # those of AXES that are known, as functions of the step
    marks: list[Mark]
    state: str  # how the run stands, in words
    ledger: dict[str, float]  # seconds of the whole run by part; empty before the first job has ended
    ledger_usd: float | None  # price of these seconds
    hours: float
    usd: float | None  # None without a price
    record: RecordedRun
    bits_per_nat: float | None  # bits per byte of a loss of one nat per token; None where that is unknown
    notes: list[str]  # on what its files have and the report has not

    @property
    def step(self) -> int:
        """The last step that was measured."""
        return int(max((curve.steps[-1] for curve in self.curves.values()), default=0))

    def along(self, axis: str, curve: Curve) -> np.ndarray:
        """Return where the points of a curve lie on an axis, (n,)."""
        position = self.axes[axis]
        return np.interp(curve.steps, position.steps, position.values)


class NotBegun(BadInput):
    """A run directory without a measurement."""


def check_begun(directory: Path) -> None:
    """Raise NotBegun where a run has no metrics yet."""
    if not (directory / METRICS).exists():
        raise NotBegun(f"{directory / METRICS}: no such file: the run has not begun; train it first")


def read_history(directory: Path) -> RunHistory:
    """Read a run directory. Raises BadInput where it is none, NotBegun where it holds no measurements yet."""
    from training.config.train_config import load_run, one_form

    run = load_run(directory, ())
    check_begun(directory)
    found = read_counted(directory)
    lines, records = found.records, current_records(found.records)
    curves = _curves(records)
    if not curves:
        raise NotBegun(f"{directory / METRICS}: holds no measurement yet; wait for the first logged step")
    record, notes = read_recorded(directory)
    try:
        model, train = ModelConfig(**(record.model or {})), one_form("train", record.train or {})
    except (TypeError, ValueError):  # none, or edited
        model, train = run.model, {}
    train = train or run.train.flat()
    batches = record.global_batch_size, train.get("global_batch_size"), train.get("microbatch_size")
    batch = next((value for value in batches if value is not None and is_number(value) and value > 0), 1)
    seconds, usd = clock(lines, record.price_per_hour)
    ledger = next((line for line in reversed(lines) if "run_ledger" in line), None)
    return RunHistory(
        name=directory.resolve().name,
        model=model,
        train=train,
        curves=curves,
        axes=_axes(records, (seconds, usd), batch * model.context_length),
        marks=_marks(records),
        state=_state(directory, records),
        ledger={} if ledger is None else ledger["run_ledger"],
        ledger_usd=None if usd is None or ledger is None else float(np.interp(ledger["elapsed_seconds"], seconds, usd)),
        hours=float(seconds[-1]) / 3600,
        usd=None if usd is None else float(usd[-1]),
        record=record,
        bits_per_nat=bits_per_nat(record),
        notes=[*found.notes(growing=is_locked(directory)), *notes],
    )


def run_names(directories: Sequence[Path]) -> list[str]:
    """Return the names of runs for people; of several with one name, their paths."""
    names = [directory.resolve().name for directory in directories]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, directories, strict=True)]


def clock(lines: Sequence[dict[str, Any]], price: float | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return seconds of the run so far and the dollars until then, both (n,), over all lines: lost work was paid.

    `price`: of a run whose jobs have recorded none.
    """
    seconds, usd = [0.0], [0.0]
    for reached, paid in priced_seconds(lines, price):
        usd.append(usd[-1] + (paid or 0.0) * (reached - seconds[-1]) / 3600)
        seconds.append(reached)
    known = last_price(lines, price) is not None
    return np.array(seconds), np.array(usd) if known else None


def _curves(records: Sequence[dict[str, Any]]) -> dict[str, Curve]:
    """Return the curves that have a value, by name."""
    logged = [record for record in records if "train_loss" in record]
    validated = [record for record in records if "validation_loss" in record]
    found = {name: _curve(logged, name) for name in LOGGED} | {"validation_loss": _curve(validated, "validation_loss")}
    for dataset in list(dict.fromkeys(key for record in validated for key in record.get("validation_losses", {})))[1:]:
        measured = [record | record.get("validation_losses", {}) for record in validated]
        found[dataset] = _curve([record for record in measured if dataset in record], dataset)
    return {name: curve for name, curve in found.items() if np.isfinite(curve.values).any()}


def _curve(records: Sequence[dict[str, Any]], key: str) -> Curve:
    known = (record.get(key) for record in records)  # null where unknown
    values = [math.nan if value is None else value for value in known]
    steps = np.array([record["step"] for record in records], np.float64)
    return Curve(steps, np.array(values, np.float64))


def _axes(
    records: Sequence[dict[str, Any]], spent: tuple[np.ndarray, np.ndarray | None], tokens_per_step: int
) -> dict[str, Curve]:
    timed = [record for record in records if "elapsed_seconds" in record and "step" in record]
    timed = sorted(timed, key=lambda record: record["step"])  # stable: in the order of the file
    elapsed = _curve(timed, "elapsed_seconds")
    ends = np.array([0.0, max((record.get("step", 0) for record in records), default=0) or 1.0])
    axes = {"steps": Curve(ends, ends), "tokens": Curve(ends, ends * tokens_per_step)}
    if timed:
        axes["hours"] = Curve(elapsed.steps, np.maximum.accumulate(elapsed.values) / 3600)
        if spent[1] is not None:
            axes["dollars"] = Curve(elapsed.steps, np.interp(axes["hours"].values * 3600, spent[0], spent[1]))
    return axes


def _marks(records: Sequence[dict[str, Any]]) -> list[Mark]:
    marks = []
    first = next((record for record in records if record.get("event") == "start"), None)
    for record in records:
        event = record.get("event")
        if event not in MARKED or record is first:
            continue
        details = [record[key] for key in ("problem", "reason", "who", "name") if isinstance(record.get(key), str)]
        if event == "start":
            details = [f"world size {record.get('world_size', '?')}, commit {record.get('commit') or 'unknown'}"]
        if event == SETTINGS_CHANGED:
            details = [f"{record.get('key')} {json.dumps(record.get('old'))} -> {json.dumps(record.get('new'))}"]
        text = ", ".join([*details, str(record.get("time", ""))]).strip(", ")
        marks.append(Mark(record.get("step", 0), MARKED[event], text))
    return marks


def _state(directory: Path, records: Sequence[dict[str, Any]]) -> str:
    """Return how a run stands: what its last job wrote when it ended, or that it runs or was killed."""
    last = next((record for record in reversed(records) if record.get("event") in ENDS), None)
    ended = read_exit(directory)
    if is_locked(directory) and (ended is None or not ended.final):  # written before the job's last report is drawn
        return "running"
    outcome = "killed" if ended is None else ended.outcome
    if last is None or last["event"] == "start":
        return "complete" if outcome == "done" else outcome
    problem = last.get("problem") or last.get("reason")
    return ENDS[last["event"]] + (f": {problem}" if problem else "")


ENDS = {"start": "", "end": "complete", "pause": "paused", "stopped": "stopped", "diverged": "diverged"}
