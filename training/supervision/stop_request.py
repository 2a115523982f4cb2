"""Stop request: any rank's wish to stop, by a signal or a used-up budget, which all ranks agree on."""

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
    """Agreement to stop: `asked` is set by a signal; --max-hours and --max-usd leave room for a whole step."""

    ranks: Ranks
    asked: threading.Event
    budget: Budget
    ledger: TimeLedger
    state: TrainState
    validation_due: Callable[[int], bool]  # of the loop's Intervals, by the updates done
    saving: Saving
    validation_steps: float  # steps that take as long as a validation, until one has been measured
    _signalled: bool = attrs.field(init=False, default=False)  # the last agreement was on a signal

    def agreed(self) -> bool:
        """Tell whether any rank wants to stop. All ranks call it at the same place and get the same answer."""
        wish = 2.0 if self.asked.is_set() else float(self.limit_reached())
        flag = torch.tensor([wish])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.ranks.control)
        self._signalled = flag.item() == 2.0
        return flag.item() > 0

    @property
    def cause(self) -> str:
        """The cause of the stop, one of `EarlyEnd`: a signal, or the option of the limit."""
        left = None if self._signalled else self.budget.seconds_left(self.ledger)
        return EarlyEnd.SIGNAL if left is None else left[1]

    @property
    def reason(self) -> Reason:
        """The cause of the stop, as exit.json has it."""
        return "stopped" if self.cause == EarlyEnd.SIGNAL else "out-of-budget"

    def limit_reached(self) -> bool:
        """Tell whether the budget might not hold another step, with the validation and the save that follow it."""
        if self.budget.seconds_left(self.ledger) is None:
            return False  # whatever becomes of what is measured for a limit
        seconds = self.saving.seconds_to_stop
        if self.validation_due(self.state.position.step + 1):
            expected = self.validation_steps * self.ledger.longest_step_seconds()
            seconds += self.ledger.typical_seconds("validation") or expected
        return self.budget.reached(self.ledger, seconds)
