"""The account of an experiment, `account.jsonl`: its wall-clock time and cost over all calls of experiment.py.

Each line has the totals of all calls so far. A call writes a line before its first job, then every few seconds while it
has jobs, and when it ends. If the final line is missing, the call was killed, and its jobs were asked to stop. Such a
call is charged until ORPHAN_SECONDS after its last line, because its jobs need this time to save a checkpoint. If one
of its runs is still locked, either a job needs longer to save or no signal has reached the job. In this case, the call
is charged for all the time until now. A call without jobs only shows results or finds that the budget is spent. Such a
call writes nothing and costs nothing.
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

CALL_SECONDS = 5.0  # time between two lines that a call writes
ORPHAN_SECONDS = 60.0
_AMOUNT = number(0, 1e15)  # plausible seconds, Unix times and dollars; a line with other numbers is damaged
_TOTALS = ValueCheck(lambda spent: all(map(_AMOUNT.holds, attrs.astuple(spent))), "totals of calls")


@attrs.frozen(kw_only=True)
class AccountLine:
    """Totals of all calls so far."""

    time: float = attrs.field(validator=_AMOUNT)  # Unix time
    spent: Spent = attrs.field(validator=_TOTALS)
    price_per_hour: float | None = attrs.field(validator=optional(_AMOUNT))  # price of the machine during this call
    ended: bool = False  # whether the call has ended
    # The machine whose clock gave `time`. None if an earlier version of this program wrote the line.
    machine: str | None = None


class Account(Spending):
    """The account of this call and all earlier calls. Only the call that locked the experiment opens the account."""

    def __init__(self, directory: Path, options: PoolOptions):
        """Add up what earlier calls have spent. Raise BadInput if the account or its last line cannot be read."""
        lines = _read_lines(directory / ACCOUNT)
        self._directory, self._budget, age = directory, options.budget, job_seconds()
        last = lines[-1] if lines else AccountLine(time=0, spent=Spent(), price_per_hour=None, ended=True)
        self.after_kill, earlier = not last.ended, _largest([line.spent for line in lines])
        if self.after_kill:
            most_seconds = math.inf if self._job_is_running() else ORPHAN_SECONDS
            seconds = min(max(0.0, self._seconds_since(last) - age), most_seconds)
            earlier = earlier.plus(seconds, last.price_per_hour)
        super().__init__(time.perf_counter() - age, options.price_per_hour, earlier)
        self._log: JsonLog | None = None
        self._written_seconds = 0.0  # age of this process when it wrote the last line

    def seconds_left(self) -> float | None:
        """Return the wall-clock seconds until the first limit is reached; None without limits."""
        seconds_and_limit = self._budget.seconds_left(self)
        return None if seconds_and_limit is None else seconds_and_limit[0]

    def describe(self) -> str:
        """Return the time and money spent so far, with their limits, such as "1 h of 2 h, $3 of $10"."""
        limits, usd = self._budget, self.usd()
        text = duration(self.elapsed_seconds())
        if limits.max_hours is not None:
            text += f" of {duration(limits.max_hours * 3600)}"
        if usd is not None:
            text += f", {dollars(usd)}" + ("" if limits.max_usd is None else f" of {dollars(limits.max_usd)}")
        return text

    def beat(self) -> None:
        """Write a line if the last line is at least CALL_SECONDS old."""
        if self._log is None or self.process_seconds() - self._written_seconds >= CALL_SECONDS:
            self._write()

    def close(self) -> None:
        if self._log is not None:
            self._write(ended=not self._job_is_running())
            self._log.close()

    def _seconds_since(self, last: AccountLine) -> float:
        """Return the seconds since a line was written.

        If another machine wrote the line, the clock of the disk is used, because both machines share the disk.
        """
        if last.machine in (None, machine_identity()):
            return time.time() - last.time
        return seconds_since_written(self._directory / ACCOUNT)

    def _job_is_running(self) -> bool:
        """Return whether a job of a killed call may still be running. Such a job still costs money."""
        locks = self._directory.glob(f"*/{LOCK_FILE}") if self.after_kill else ()
        return any(lock_is_held(lock.parent) for lock in locks)

    def _write(self, *, ended: bool = False) -> None:
        self._written_seconds = self.process_seconds()
        spent = self.earlier.plus(self._written_seconds, self.price_per_hour)
        now, machine = time.time(), machine_identity()
        line = AccountLine(time=now, spent=spent, price_per_hour=self.price_per_hour, ended=ended, machine=machine)
        with writing(self._directory / ACCOUNT):
            self._log = self._log or JsonLog(self._directory / ACCOUNT)
            self._log.append(attrs.asdict(line), durable=True)


def _read_lines(path: Path) -> list[AccountLine]:
    """Return the lines of an account. A damaged line is skipped if a later line has the totals.

    Raise BadInput if the last line is complete but damaged, because the totals of the earlier lines would be too small.
    """
    log = read_json_lines(path, partial(structured, kind=AccountLine))
    if log.ends_damaged and not log.ends_torn:
        raise BadInput(
            f"{path}: line {log.damaged[-1]:,} cannot be read, so the time and money spent until then are unknown; "
            "correct the line, or remove it to use the totals of the line before it"
        )
    lines: list[AccountLine] = log.noted()
    return lines


def _largest(totals: Sequence[Spent]) -> Spent:
    """Return the largest totals.

    Totals never decrease, so a line with smaller totals was edited or is out of order.
    """
    rows = [attrs.asdict(spent) for spent in totals]
    return Spent(**{key: max(row[key] for row in rows) for key in rows[0]}) if rows else Spent()
