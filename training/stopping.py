"""Stopping early: any rank's wish, by a signal or a used-up budget, agreed on by all ranks."""

import threading

import attrs
import torch
import torch.distributed as dist

from training.parallel.process_group import Ranks
from training.saving import Saving
from training.state import TrainState
from training.step_intervals import Intervals
from training.telemetry.budget import Budget
from training.telemetry.time_ledger import TimeLedger


@attrs.frozen(kw_only=True)
class Limits:
    """--max-hours and --max-usd of a job that trains: room for the next step, and for validation and save after it."""

    budget: Budget
    ledger: TimeLedger
    state: TrainState
    intervals: Intervals
    saving: Saving
    validation_steps: float  # steps that take as long as a validation, until one has been measured

    def reached(self) -> bool:
        """Tell whether the budget might not hold another step, with the validation and the save that follow it."""
        if self.budget.seconds_left(self.ledger) is None:
            return False
        seconds = self.saving.seconds_to_stop
        if self.intervals.validation_due(self.state.position.step + 1):
            expected = self.validation_steps * self.ledger.longest_step_seconds()
            seconds += self.ledger.typical_seconds("validation") or expected
        return self.budget.reached(self.ledger, seconds)


class StopRequest:
    """Agreement to stop: `asked` is set by a signal."""

    def __init__(self, ranks: Ranks, asked: threading.Event, limits: Limits):
        self._signalled = False  # the last agreement was on a signal
        self._ranks, self._asked, self._limits = ranks, asked, limits

    def agreed(self) -> bool:
        """Tell whether any rank wants to stop. All ranks call it at the same place and get the same answer."""
        wish = 2.0 if self._asked.is_set() else float(self._limits.reached())
        flag = torch.tensor([wish])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._ranks.control)
        self._signalled = flag.item() == 2.0
        return flag.item() > 0

    @property
    def cause(self) -> str:
        """The cause of the stop: "signal", or the option of the limit."""
        left = None if self._signalled else self._limits.budget.seconds_left(self._limits.ledger)
        return "signal" if left is None else left[1]
