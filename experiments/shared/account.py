"""Account of an experiment: its wall-clock time and cost over all calls, in `account.jsonl`, kills included.

The machine costs while a call lives, and while jobs of a killed call live on. A call writes when it began, a beat every
few seconds, each job that it starts, and its end. Without an end it counts to its last beat, or to what its jobs wrote
last where that is later, and CALL_SECONDS more: never less than was paid. While such a job still trains, to now. A call
without jobs writes nothing and costs nothing: one that only shows results, or that finds the budget spent.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from common.errors import printable
from common.files import writing
from common.json_files import JsonLog, read_json_lines
from common.structure import structured
from experiments.shared.pool_options import PoolOptions
from experiments.shared.training_process import PoolJob
from training.launch import job_seconds
from training.telemetry.progress_bar import duration

ACCOUNT = "account.jsonl"
LONGEST_FILE_NAME = 255  # bytes of a file name
MOST = 1e15  # seconds, Unix time or dollars of a line that is not damaged


@attrs.frozen(kw_only=True)
class Spent:
    """Wall-clock time and cost."""

    seconds: float = 0.0
    usd: float = 0.0  # each call at its own price
    unpriced_seconds: float = 0.0  # not in `usd`


@attrs.frozen(kw_only=True)
class CallStart:
    """Start of a call of experiment.py."""

    began: float  # Unix time
    price_per_hour: float | None
    earlier: Spent  # by the calls before


@attrs.frozen(kw_only=True)
class AccountLine:
    """A line of a call; a beat where it says nothing but its time."""

    seconds: float  # age of the call
    call: CallStart | None = None  # the call begins
    run: str | None = None  # a job of this run begins, or without `job` ends
    job: PoolJob | None = None
    ended: bool = False  # the call ends


def read_account(directory: Path) -> tuple[list[AccountLine], list[str]]:
    """Return the lines of an experiment's account, and a note on those that are left out as damaged.

    Raises BadInput where it cannot be read at all.
    """
    found = read_json_lines(directory / ACCOUNT)
    lines = {number: _line(record) for record, number in zip(found.records, found.numbers, strict=True)}
    found = found.without([number for number, line in lines.items() if line is None])
    return [line for line in lines.values() if line is not None], found.notes()


def _line(record: dict[str, Any]) -> AccountLine | None:
    """Return a line; None for a damaged one."""
    try:
        line = structured(record, AccountLine)
    except ValueError:
        return None
    call, job = line.call, line.job
    numbers = [line.seconds] if job is None else [line.seconds, job.began, job.seconds or 0.0]
    if call is not None:
        numbers += [call.began, call.price_per_hour or 0.0, *attrs.astuple(call.earlier)]
    return line if _is_name(line.run or "run") and all(0 <= one <= MOST for one in numbers) else None


def _is_name(text: str) -> bool:
    """Tell whether a text can be the name of a run directory."""
    return text.isprintable() and "/" not in text and len(text.encode()) <= LONGEST_FILE_NAME


CALL_SECONDS = 5.0


class Account:
    """The account of one call, and of those before it. Only the call that has locked the experiment opens it."""

    def __init__(self, directory: Path, options: PoolOptions):
        """Count the earlier calls. Raises BadInput where the account cannot be read."""
        lines, notes = read_account(directory)
        for note in notes:
            print(printable(note), file=sys.stderr)
        self._directory, self._budget, age = directory, options.budget, job_seconds()
        self.price_per_hour = options.price_per_hour
        self._began, self._began_unix = time.monotonic() - age, time.time() - age
        held = {line.run: line.job for line in lines if line.run is not None}
        # by runs whose jobs were not seen to end
        self.jobs: dict[str, PoolJob] = {run: job for run, job in held.items() if job is not None}
        self.earlier = _spent_before(lines, self._began_unix, self._jobs_until())
        self._log: JsonLog | None = None
        self._beaten = 0.0

    def call_seconds(self) -> float:
        """Return the age of this call."""
        return time.monotonic() - self._began

    def elapsed_seconds(self) -> float:
        return self.earlier.seconds + self.call_seconds()

    def usd(self) -> float | None:
        """Return the cost so far; None without a price. Calls without a price count at that of this one."""
        if self.price_per_hour is None:
            return None
        return self.earlier.usd + self.price_per_hour * (self.earlier.unpriced_seconds + self.call_seconds()) / 3600

    def seconds_left(self) -> float | None:
        """Return the wall-clock seconds until the first limit; None without limits."""
        left = self._budget.seconds_left(self)
        return None if left is None else left[0]

    def describe(self) -> str:
        """Return the spent shares of the limits, as text."""
        limits, usd = self._budget, self.usd()
        text = duration(self.elapsed_seconds())
        if limits.max_hours is not None:
            text += f" of {duration(limits.max_hours * 3600)}"
        if usd is not None:
            text += f", ${usd:,.2f}" + ("" if limits.max_usd is None else f" of ${limits.max_usd:,.2f}")
        return text

    def beat(self) -> None:
        """Write a beat, if the last one is old enough."""
        if self._log is None or self.call_seconds() - self._beaten >= CALL_SECONDS:
            self._write(AccountLine(seconds=self.call_seconds()))

    def started(self, run: str, devices: list[str], seconds: float | None = None) -> PoolJob:
        """Write and return a job that is about to start; `seconds`: its limit of time."""
        job = self.jobs[run] = PoolJob(devices=devices, began=time.time(), seconds=seconds)
        self._write(AccountLine(seconds=self.call_seconds(), run=run, job=job))
        return job

    def ended(self, run: str) -> None:
        """Write the end of a job."""
        if self.jobs.pop(run, None) is not None:
            self._write(AccountLine(seconds=self.call_seconds(), run=run))

    def close(self) -> None:
        if self._log is not None:
            self._write(AccountLine(seconds=self.call_seconds(), ended=True))
            self._log.close()

    def _write(self, line: AccountLine) -> None:
        """Write a line, and before the first one that this call began."""
        with writing(self._directory / ACCOUNT):
            if self._log is None:
                self._log = JsonLog(self._directory / ACCOUNT)
                call = CallStart(began=self._began_unix, price_per_hour=self.price_per_hour, earlier=self.earlier)
                self._log.append(_record(AccountLine(seconds=line.seconds, call=call)))
            self._beaten = line.seconds
            self._log.append(_record(line), durable=True)

    def _jobs_until(self) -> float:
        """Return when the jobs that earlier calls have left behind wrote last, Unix time: now, where one still trains.

        0.0 without any.
        """
        places = {run: self._directory / run for run in self.jobs}
        if any(job.lives(places[run]) for run, job in self.jobs.items()):
            return self._began_unix
        return max((job.last_written(places[run]) for run, job in self.jobs.items()), default=0.0)


def _record(line: AccountLine) -> dict[str, object]:
    """Return a line as JSON, without what it does not say."""
    return attrs.asdict(line, filter=lambda field, value: value != field.default or field.default is attrs.NOTHING)


def _spent_before(lines: Sequence[AccountLine], now: float, jobs_until: float) -> Spent:
    """Return the totals of earlier calls; Unix times."""
    call, seconds, ended = None, 0.0, True
    for line in lines:
        # The start of a call was damaged. The first line after an intact one may be earlier by a moment.
        if line.call is None and call is not None and (ended or line.seconds < seconds - CALL_SECONDS):
            began, earlier = (
                call.began + seconds,
                _with_call(call, seconds if ended else seconds + CALL_SECONDS),
            )
            call = attrs.evolve(call, began=began, earlier=earlier)
        call, seconds, ended = line.call or call, line.seconds, line.ended
    if call is None:
        return Spent()
    if not ended:
        longest = max(now - call.began, seconds)
        seconds = min(max(seconds, jobs_until - call.began) + CALL_SECONDS, longest)
    return _with_call(call, seconds)


def _with_call(call: CallStart, seconds: float) -> Spent:
    """Return the total after a call that took so long."""
    before = call.earlier
    return Spent(
        seconds=before.seconds + seconds,
        usd=before.usd + (0.0 if call.price_per_hour is None else call.price_per_hour * seconds / 3600),
        unpriced_seconds=before.unpriced_seconds + (seconds if call.price_per_hour is None else 0.0),
    )
