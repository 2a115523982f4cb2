"""Requests to stop, which come from a signal or from a budget that is used up. All ranks agree on them."""

import threading
from collections.abc import Callable

import attrs
import torch
import torch.distributed as dist

from common.errors import Reason
from training.parallel.process_group import Ranks
from training.saving import Saving
from training.state import TrainState
from training.telemetry.budget import Budget
from training.telemetry.metrics_log import EarlyEnd
from training.telemetry.time_ledger import TimeLedger


@attrs.define(kw_only=True)
class StopRequest:
    """Agreement of all ranks to stop. --max-hours and --max-usd stop a run before a step that may exceed the budget."""

    ranks: Ranks
    stop_requested: threading.Event  # set by a signal, and when the parent process has ended
    budget: Budget
    ledger: TimeLedger
    state: TrainState
    validation_due: Callable[[int], bool]  # `Intervals.validation_due` of the loop
    saving: Saving
    validation_steps: float  # estimated duration of a validation, in steps; used until a validation has been measured
    _signalled: bool = attrs.field(init=False, default=False)  # whether a signal caused the latest agreement

    def agreed(self) -> bool:
        """Return whether any rank has to stop. All ranks call this at the same point and get the same answer."""
        urgency = 2.0 if self.stop_requested.is_set() else float(self.limit_reached())
        flag = torch.tensor([urgency])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.ranks.control)
        self._signalled = flag.item() == 2.0
        return flag.item() > 0

    @property
    def cause(self) -> str:
        """The cause of the stop, one of `EarlyEnd`: a signal, or the option that sets the limit."""
        limit = None if self._signalled else self.budget.seconds_left(self.ledger)
        return EarlyEnd.SIGNAL if limit is None else limit[1]

    @property
    def reason(self) -> Reason:
        """The reason that exit.json records for the stop."""
        return "stopped" if self.cause == EarlyEnd.SIGNAL else "out-of-budget"

    def limit_reached(self) -> bool:
        """Return whether the budget may be too small for one more step, with the validation and the save after it."""
        if self.budget.seconds_left(self.ledger) is None:
            return False  # without a limit, the measurements below do not matter
        seconds = self.saving.seconds_to_stop
        if self.validation_due(self.state.position.step + 1):
            expected = self.validation_steps * self.ledger.longest_step_seconds()
            seconds += self.ledger.typical_seconds("validation") or expected
        return self.budget.reached(self.ledger, seconds)
