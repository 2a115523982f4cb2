"""The metrics log, `metrics.jsonl`: append-only, one JSON object per line; the source of every chart and report.

Lines with `train_loss` or `validation_loss` are measurements after `step` updates; lines with `event` are events of the
run. A job that resumes from step N begins with an event "start" at N. `read_metrics` then leaves out everything that
earlier jobs logged after step N. If an earlier job had also started at N, the events of its start are left out as well,
because none of its steps remain.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.checks import integer, number, optional
from common.files import writing
from common.json_files import JsonLines, JsonLog, is_number, read_json_lines, utc_now
from common.output import progress, show, warning

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"  # what evaluate.py measured
GIVEN_TOKENIZER = "given_tokenizer"  # key of a result that was measured with the tokenizer given by --tokenizer
# Keys of lines in evaluations.jsonl: the hash of the measured weights' values, and the hash of the weights' file
WEIGHTS_VALUES, WEIGHTS_FILE = "weights_sha256", "weights_file_sha256"
SAMPLES = "samples.jsonl"  # what report.py generated and measured at checkpoints
REPORT = "report.html"  # the page that report.py writes
REFERENCE = "reference.json"  # losses of other runs with the same recipe
ANSWERS = "answers"  # folder for answers that fine-tuned copies of the model gave
ACCOUNT = "account.jsonl"  # time and cost of an experiment
EXPERIMENTS = SWEEP, TRIAL, LADDER = "sweep", "trial", "ladder"  # commands of experiment.py, and names of their results


class Metric:
    """Keys of measured values. The table of lines in docs/run-directory.md explains them."""

    TRAIN_LOSS = "train_loss"  # nats per token of the global batch, before the update
    VALIDATION_LOSS = "validation_loss"  # on the first dataset
    VALIDATION_LOSSES = "validation_losses"  # by dataset, if there are several
    LEARNING_RATE = "learning_rate"
    GRAD_NORM = "grad_norm"  # before clipping
    EPOCHS = "epochs"  # of each dataset
    TOKENS_PER_SECOND = "tokens_per_second"  # of the whole job
    MFU = "mfu"
    PEAK_MEMORY_BYTES = "peak_memory_bytes"
    RANK_SECONDS = "rank_seconds"
    STATE_SHA256 = "state_sha256"
    ELAPSED_SECONDS = "elapsed_seconds"  # of the run
    PRICE_PER_HOUR = "price_per_hour"  # price of a job's machine in USD, in the event that starts the job
    LEDGER = "ledger"  # seconds of a job, by part
    RUN_LEDGER = "run_ledger"  # seconds of the run, including all its jobs, by part
    USD = "usd"  # cost of the run, including all its jobs
    SKIPPED_STEPS = "skipped_steps"  # written by earlier versions


class RunEvent:
    """Names of events, in the key `event` of a line."""

    START = "start"  # a job starts
    END = "end"  # the run is complete
    PAUSE = "pause"  # the job has reached --max-steps
    STOPPED = "stopped"  # the job stopped early because of a signal or a limit
    DIVERGED = "diverged"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_FAILED = "checkpoint-failed"
    UPLOAD = "upload"
    UPLOAD_FAILED = "upload-failed"
    SELF_TEST = "self-test"
    SETTINGS_CHANGED = "settings-changed"  # a job resumed the run with a different value of a key
    NUMERICS_DRIFT = "numerics-drift"  # a job resumed with different numerics; written before its "start"
    DROPPED = "dropped"  # output was lost, or advisory work failed
    SPIKE_SKIPPED = "spike-skipped"  # written by earlier versions


class Detail:
    """Keys of event details that code reads. The table of lines in docs/run-directory.md explains them.

    Details that only people read, such as the seconds of a save, have no constant here.
    """

    PROBLEM = "problem"  # description of a failure
    REASON = "reason"  # why training ended early: one of EarlyEnd
    NAME = "name"  # name of a checkpoint
    SOURCES = "sources"  # tokens and epochs read from each dataset
    WORLD_SIZE = "world_size"
    DATA_PARALLEL_SIZE = "data_parallel_size"
    DEVICES = "devices"  # name of a GPU or CPU -> number of ranks that use it
    SOFTWARE = "software"
    COMMIT = "commit"
    CHANGES = "changes"  # changes in the numerics, one string per change
    KEY = "key"  # key of a setting that changed
    OLD = "old"
    NEW = "new"
    WHO = "who"  # written by earlier versions


class EarlyEnd:
    """Values of `Detail.REASON`: why training ended before the run's last step.

    These differ from `Reason` in common/errors.py, which exit.json uses. A `Reason` says why a command ended, and can
    be an error. In exit.json, --max-hours and --max-usd have the same reason, "out-of-budget". Patience has no reason
    of its own there, because a run that it ends is complete.
    """

    SIGNAL = "signal"  # in an event "stopped"
    MAX_HOURS = "--max-hours"  # in an event "stopped": the option that set the limit
    MAX_USD = "--max-usd"
    PATIENCE = "patience"  # in an event "end"


# Events that each job writes at the step where it begins
BEGINNING = (RunEvent.START, RunEvent.NUMERICS_DRIFT, RunEvent.SELF_TEST, RunEvent.SETTINGS_CHANGED)
# The most recent of these events shows the state of a run
STATES = (RunEvent.START, RunEvent.PAUSE, RunEvent.STOPPED, RunEvent.END, RunEvent.DIVERGED)

MOST_SECONDS = 1e10
_EVENT = "event"
_LOSSES = (Metric.TRAIN_LOSS, Metric.VALIDATION_LOSS)  # may be nan
_NEEDED = {  # key -> the keys that a record with this key must also have
    Metric.LEDGER: (Metric.RUN_LEDGER, Metric.ELAPSED_SECONDS),
    Metric.RUN_LEDGER: (Metric.ELAPSED_SECONDS,),
}
_DETAILS = {RunEvent.DIVERGED: (Detail.PROBLEM,), RunEvent.STOPPED: (Detail.REASON,)}  # strings that an event must have


def result_files(directory: Path, experiment: str) -> tuple[Path, Path]:
    """Return the two files of an experiment's results: a table for people and a record for programs."""
    return directory / f"{experiment}.md", directory / f"{experiment}.json"


class MetricsLog:
    """Appends records to the file. If writing fails, prints a warning and keeps the records in memory."""

    def __init__(self, directory: Path):
        """Open the file. Raises BadInput if it cannot be opened or is not a regular file."""
        with writing(directory / METRICS):
            self._log = JsonLog(directory / METRICS)
        self._failing = False

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, or keep it in memory until a later record can be written."""
        try:
            self._log.append(record)
        except OSError as error:
            if not self._failing:
                show(
                    warning(
                        f"{self._log.path}: cannot be written: {error.strerror}; lines are kept in memory, and writing "
                        "is tried again with each new line"
                    )
                )
            self._failing = True
            return
        if self._failing:
            self._failing = False
            show(progress(f"{self._log.path}: can be written again; the lines in memory have been written"))

    def close(self) -> None:
        """Write the lines that are kept in memory and close the file; print how many lines are lost."""
        reason: str | None = "too many to keep in memory"
        try:
            self._log.flush()
        except OSError as error:
            reason = error.strerror
        if lost_lines := self._log.unwritten:
            show(warning(f"{self._log.path}: {lost_lines:,} lines could not be written and are lost: {reason}"))
        self._log.close()


def event_record(step: int, event: str, **details: Any) -> dict[str, Any]:
    """Return the record of an event that happens now."""
    return {_EVENT: event, "step": step, **details, "time": utc_now()}


def event_of(record: Mapping[str, Any]) -> str:
    """Return the name of the event that a record describes, one of `RunEvent`; "" if it contains measurements."""
    return str(record.get(_EVENT, ""))


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the records that belong to the present state of the run, in order.

    Raises BadInput as `read_counted` does.
    """
    return current_records(read_counted(directory).records)


def current_records(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select the records that belong to the present state of the run, in order.

    If several jobs started at the same step, only the last of these jobs, with its steps and its start, remains.
    """
    records: list[dict[str, Any]] = []
    for record in lines:
        if event_of(record) == RunEvent.START:
            step = record["step"]
            drift = records.pop() if records and _is_drift(records[-1], step) else None
            # Leave out the BEGINNING events of earlier jobs at the step where this job starts.
            records = [
                earlier for earlier in records if earlier.get("step", 0) < step + (event_of(earlier) not in BEGINNING)
            ]
            records += [] if drift is None else [drift]
        records.append(record)
    return records


def _is_drift(record: dict[str, Any], step: int) -> bool:
    return event_of(record) == RunEvent.NUMERICS_DRIFT and record.get("step") == step


def read_counted(directory: Path) -> JsonLines:
    """Return the records of all jobs, including superseded ones. Raises BadInput if the file cannot be read at all."""
    return read_json_lines(directory / METRICS, _sound)


def read_starts(directory: Path) -> list[int]:
    """Return the step from which each job started, in order. Raises BadInput as `read_counted` does."""
    lines = read_json_lines(directory / METRICS, _sound, containing=f'"{RunEvent.START}"'.encode())
    return [record["step"] for record in lines.records if event_of(record) == RunEvent.START]


def is_price(value: Any) -> bool:
    return value is not None and _CHECKS[Metric.PRICE_PER_HOUR](value)


def last_price(lines: Sequence[dict[str, Any]], otherwise: float | None = None) -> float | None:
    """Return the price per hour of the last job that has one, or `otherwise`. `lines` are the records of all jobs."""
    prices = [line.get(Metric.PRICE_PER_HOUR) for line in lines if event_of(line) == RunEvent.START]
    return next((price for price in reversed(prices) if price is not None), otherwise)


def priced_seconds(lines: Sequence[dict[str, Any]], otherwise: float | None) -> Iterator[tuple[float, float | None]]:
    """For each line, yield the run's seconds so far, and the price per hour that applied since the previous line.

    For a job without a price, `otherwise` is used.
    """
    price, reached = otherwise, 0.0
    for line in lines:
        if event_of(line) == RunEvent.START:
            price = otherwise if line.get(Metric.PRICE_PER_HOUR) is None else line[Metric.PRICE_PER_HOUR]
        reached = max(reached, line.get(Metric.ELAPSED_SECONDS, 0.0))
        yield reached, price


def _sound(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return a record if it has the fields on which its readers rely, with valid types and ranges; otherwise None."""
    event = record.get(_EVENT, "")
    needs_step = any(key in record for key in _LOSSES) or event in (RunEvent.START, RunEvent.END)
    step = record.get("step", None if needs_step else 0)
    if not integer(0).holds(step) or not isinstance(event, str):
        return None
    sound = (
        all(key in record for first, needed in _NEEDED.items() if first in record for key in needed)
        and all(isinstance(record.get(key), str) for key in _DETAILS.get(event, ()))
        and all(holds(record[key]) for key, holds in _CHECKS.items() if key in record)
    )
    return record if sound else None


def _is_loss(value: Any) -> bool:
    """Return whether a value is a mean cross-entropy, which is never negative, or the loss of a run that diverged."""
    return (is_number(value) and value >= 0) or (type(value) is float and not math.isfinite(value))


def _is_ledger(value: Any) -> bool:
    """Return whether a value maps parts to seconds. Some seconds may be negative if the clock was changed."""
    seconds = number(-MOST_SECONDS, MOST_SECONDS)
    return isinstance(value, dict) and "compile" in value and all(map(seconds.holds, value.values()))


def _are_sources(value: Any) -> bool:
    count = integer(0, (1 << 64) - 1)
    return isinstance(value, list) and all(
        isinstance(source, dict) and count.holds(source.get("tokens")) for source in value
    )


def _are_devices(value: Any) -> bool:
    """Return whether a value maps each name of a device to the number of ranks that use such a device."""
    return isinstance(value, dict) and bool(value) and all(map(integer(1).holds, value.values()))


_CHECKS: dict[str, Callable[[Any], bool]] = {  # checks of the values that readers use
    **dict.fromkeys((Metric.LEARNING_RATE, Metric.SKIPPED_STEPS), number(0).holds),
    **dict.fromkeys(
        (Metric.GRAD_NORM, Metric.TOKENS_PER_SECOND, Metric.MFU, Metric.PEAK_MEMORY_BYTES), optional(number(0)).holds
    ),
    Metric.ELAPSED_SECONDS: number(0, MOST_SECONDS).holds,
    Metric.PRICE_PER_HOUR: optional(number(0, 1e9)).holds,
    **dict.fromkeys(_LOSSES, _is_loss),
    **dict.fromkeys((Metric.LEDGER, Metric.RUN_LEDGER), _is_ledger),
    Metric.VALIDATION_LOSSES: lambda value: isinstance(value, dict) and all(map(_is_loss, value.values())),
    Detail.SOURCES: _are_sources,
    Detail.DEVICES: _are_devices,
    Detail.SOFTWARE: lambda value: isinstance(value, str),
}
