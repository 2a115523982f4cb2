"""Account of an experiment: its wall-clock time and cost over all calls, in `account.jsonl`, kills included.

Each line has the totals of all calls so far: a call writes one before its first job, then every few seconds while it
has jobs, and at its end. One without that end was killed, and its jobs were asked to stop: it counts until
ORPHAN_SECONDS after its last line, time to save a checkpoint, and to now while a run is still held, by a job that saves
for longer or that no signal has reached. A call without jobs writes nothing and costs nothing: one that only shows
results, or that finds the budget spent.
"""

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import attrs

from common.checks import ValueCheck, number, optional, structured
from common.errors import BadInput
from common.files import seconds_since_written, writing
from common.json_files import JsonLog, read_json_lines
from common.launch import job_seconds, machine_identity
from common.text import dollars, duration
from experiments.shared.training_jobs import PoolOptions
from training.supervision.run_lock import LOCK_FILE, lock_is_held
from training.telemetry.metrics_log import ACCOUNT
from training.telemetry.time_ledger import Spending, Spent

CALL_SECONDS = 5.0  # between beats
ORPHAN_SECONDS = 60.0
_AMOUNT = number(0, 1e15)  # seconds, Unix time or dollars of a line that is not damaged
_TOTALS = ValueCheck(lambda spent: all(map(_AMOUNT.holds, attrs.astuple(spent))), "totals of calls")


@attrs.frozen(kw_only=True)
class AccountLine:
    """Totals of all calls so far."""

    time: float = attrs.field(validator=_AMOUNT)  # Unix
    spent: Spent = attrs.field(validator=_TOTALS)
    price_per_hour: float | None = attrs.field(validator=optional(_AMOUNT))  # of this call
    ended: bool = False  # the call
    machine: str | None = None  # whose clock `time` is of; None in a line of an earlier version


class Account(Spending):
    """The account of one call, and of those before it. Only the call that has locked the experiment opens it."""

    def __init__(self, directory: Path, options: PoolOptions):
        """Count the earlier calls. Raises BadInput where the account cannot be read, or not up to its end."""
        lines = _read_lines(directory / ACCOUNT)
        self._directory, self._budget, age = directory, options.budget, job_seconds()
        last = lines[-1] if lines else AccountLine(time=0, spent=Spent(), price_per_hour=None, ended=True)
        self.after_kill, earlier = not last.ended, _largest([line.spent for line in lines])
        if self.after_kill:
            most = math.inf if self._job_left() else ORPHAN_SECONDS
            seconds = min(max(0.0, self._seconds_since(last) - age), most)
            earlier = earlier.plus(seconds, last.price_per_hour)
        super().__init__(time.perf_counter() - age, options.price_per_hour, earlier)
        self._log: JsonLog | None = None
        self._beaten = 0.0

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
            text += f", {dollars(usd)}" + ("" if limits.max_usd is None else f" of {dollars(limits.max_usd)}")
        return text

    def beat(self) -> None:
        """Write a beat, if the last one is old enough."""
        if self._log is None or self.process_seconds() - self._beaten >= CALL_SECONDS:
            self._write()

    def close(self) -> None:
        if self._log is not None:
            self._write(ended=not self._job_left())
            self._log.close()

    def _seconds_since(self, last: AccountLine) -> float:
        """Return the seconds since a line; if another machine wrote it, by the disk's clock, which both share."""
        if last.machine in (None, machine_identity()):
            return time.time() - last.time
        return seconds_since_written(self._directory / ACCOUNT)

    def _job_left(self) -> bool:
        """Tell whether a job of a killed call may still live: then the experiment's time goes on."""
        locks = self._directory.glob(f"*/{LOCK_FILE}") if self.after_kill else ()
        return any(lock_is_held(lock.parent) for lock in locks)

    def _write(self, *, ended: bool = False) -> None:
        self._beaten = self.process_seconds()
        spent = self.earlier.plus(self._beaten, self.price_per_hour)
        now, machine = time.time(), machine_identity()
        line = AccountLine(time=now, spent=spent, price_per_hour=self.price_per_hour, ended=ended, machine=machine)
        with writing(self._directory / ACCOUNT):
            self._log = self._log or JsonLog(self._directory / ACCOUNT)
            self._log.append(attrs.asdict(line), durable=True)


def _read_lines(path: Path) -> list[AccountLine]:
    """Return the lines of an account. Damaged ones between others are left out: a later line has their totals.

    Raises BadInput for a whole damaged line at the end. The totals before it would count less than was spent.
    """
    found = read_json_lines(path, partial(structured, kind=AccountLine))
    if found.ends_damaged and not found.ends_torn:
        raise BadInput(
            f"{path}: line {found.damaged[-1]:,} cannot be read, so the time and money spent until then are not known; "
            "correct the line, or remove it to count only the lines before it"
        )
    lines: list[AccountLine] = found.noted()
    return lines


def _largest(totals: Sequence[Spent]) -> Spent:
    """Return the largest totals: they never fall, so a line with smaller ones was edited or is out of order."""
    rows = [attrs.asdict(spent) for spent in totals]
    return Spent(**{key: max(row[key] for row in rows) for key in rows[0]}) if rows else Spent()
