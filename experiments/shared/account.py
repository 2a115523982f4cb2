"""Account of an experiment: its wall-clock time and cost over all calls, in `account.jsonl`, kills included.

A call writes when it began, a beat every few seconds while it has jobs, and its end. Without an end it was killed, and
its jobs were asked to stop: it counts until ORPHAN_SECONDS after its last beat, time to save a checkpoint, and to now
while a run is still held, by a job that saves for longer or that no signal has reached. A call without jobs writes
nothing and costs nothing: one that only shows results, or that finds the budget spent.
"""

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import attrs

from common.checks import ValueCheck, number, optional, structured
from common.errors import printable
from common.files import writing
from common.json_files import JsonLog, read_json_lines
from experiments.shared.training_jobs import PoolOptions
from training.launch import job_seconds
from training.supervision.run_lock import LOCK_FILE, lock_is_held
from training.telemetry.progress_bar import duration
from training.telemetry.time_ledger import Spending, Spent

ACCOUNT = "account.jsonl"
CALL_SECONDS = 5.0  # between beats
ORPHAN_SECONDS = 60.0
_AMOUNT = number(0, 1e15)  # seconds, Unix time or dollars of a line that is not damaged
_TOTALS = ValueCheck(lambda spent: all(map(_AMOUNT.holds, attrs.astuple(spent))), "totals of calls")


@attrs.frozen(kw_only=True)
class CallStart:
    """Start of a call of experiment.py."""

    began: float = attrs.field(validator=_AMOUNT)  # Unix time
    price_per_hour: float | None = attrs.field(validator=optional(_AMOUNT))
    earlier: Spent = attrs.field(validator=_TOTALS)  # by the calls before


@attrs.frozen(kw_only=True)
class AccountLine:
    """A line of a call; a beat where it says nothing but its time."""

    seconds: float = attrs.field(validator=_AMOUNT)  # age of the call
    call: CallStart | None = None  # the call begins
    ended: bool = False  # the call ends


class Account(Spending):
    """The account of one call, and of those before it. Only the call that has locked the experiment opens it."""

    def __init__(self, directory: Path, options: PoolOptions):
        """Count the earlier calls. Raises BadInput where the account cannot be read."""
        # 2996586 wrote other keys as well
        lines = read_json_lines(directory / ACCOUNT, partial(structured, kind=AccountLine, unknown_keys=True))
        for note in lines.notes():
            print(printable(note), file=sys.stderr)
        self._directory, self._budget, age = directory, options.budget, job_seconds()
        self._began_unix = time.time() - age
        self.after_kill = bool(lines.records) and not lines.records[-1].ended
        earlier = _spent_before(lines.records, self._began_unix, job_lives=self._job_left())
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
            text += f", ${usd:,.2f}" + ("" if limits.max_usd is None else f" of ${limits.max_usd:,.2f}")
        return text

    def beat(self) -> None:
        """Write a beat, if the last one is old enough."""
        if self._log is None or self.process_seconds() - self._beaten >= CALL_SECONDS:
            self._write()

    def close(self) -> None:
        if self._log is not None:
            self._write(ended=not self._job_left())
            self._log.close()

    def _job_left(self) -> bool:
        """Tell whether a job of a killed call may still live: then the experiment's time goes on."""
        locks = self._directory.glob(f"*/{LOCK_FILE}") if self.after_kill else ()
        return any(lock_is_held(lock.parent) for lock in locks)

    def _write(self, *, ended: bool = False) -> None:
        """Write a line, and before the first one that this call began."""
        self._beaten = self.process_seconds()
        with writing(self._directory / ACCOUNT):
            if self._log is None:
                self._log = JsonLog(self._directory / ACCOUNT)
                call = CallStart(began=self._began_unix, price_per_hour=self.price_per_hour, earlier=self.earlier)
                self._log.append({"seconds": self._beaten, "call": attrs.asdict(call)})
            self._log.append({"seconds": self._beaten} | ({"ended": True} if ended else {}), durable=True)


def _spent_before(lines: Sequence[AccountLine], now: float, *, job_lives: bool) -> Spent:
    """Return the totals of earlier calls; `now`: Unix time; `job_lives`: one that the last call has left."""
    call, seconds, ended = None, 0.0, True
    for line in lines:
        # The start of a call was damaged. The first line after an intact one may be earlier by a moment.
        if line.call is None and call is not None and (ended or line.seconds < seconds - CALL_SECONDS):
            earlier = _with_call(call, seconds if ended else seconds + ORPHAN_SECONDS)
            call = attrs.evolve(call, began=call.began + seconds, earlier=earlier)
        call, seconds, ended = line.call or call, line.seconds, line.ended
    if call is None:
        return Spent()
    until_now = max(now - call.began, seconds)
    return _with_call(call, seconds if ended else until_now if job_lives else min(seconds + ORPHAN_SECONDS, until_now))


def _with_call(call: CallStart, seconds: float) -> Spent:
    """Return the total after a call that took so long."""
    before, price = call.earlier, call.price_per_hour
    return Spent(
        seconds=before.seconds + seconds,
        usd=before.usd + (price or 0.0) * seconds / 3600,
        unpriced_seconds=before.unpriced_seconds + (seconds if price is None else 0.0),
    )
