"""Step intervals, after which a run logs, validates, saves and hashes its state; and stopping early.

A stop is any rank's wish, by a signal or a used-up budget, agreed on by all ranks.
"""

import threading

import attrs
import torch
import torch.distributed as dist

from common.errors import Reason
from common.output import advisory
from training.config.batch_plan import count_due
from training.parallel.process_group import Ranks
from training.saving import Saving
from training.state import Position, TrainState
from training.telemetry.budget import Budget
from training.telemetry.time_ledger import Remaining, TimeLedger


@attrs.frozen(kw_only=True)
class Intervals:
    """Intervals in steps. A `step` here counts the updates done."""

    log: int
    checkpoint: int
    validation: int | None  # None: no validation
    patience: int | None = None  # checkpoints without a new best validation loss; None: any number
    state_hash: int | None
    last_step: int  # where this job ends: the run's last step, or --max-steps

    def log_due(self, step: int) -> bool:
        return step % self.log == 0 or step in (1, self.last_step)

    def checkpoint_due(self, step: int) -> bool:
        return step > 0 and (step % self.checkpoint == 0 or step == self.last_step)

    def validation_due(self, step: int) -> bool:
        return self.validation is not None and (step % self.validation == 0 or self.checkpoint_due(step))

    def out_of_patience(self, position: Position) -> bool:
        """Tell whether a validated position ends the run early: as many checkpoints since the best one."""
        step, best = position.step, position.best_step
        if self.patience is None or best is None:
            return False
        return step // self.checkpoint - best // self.checkpoint >= self.patience

    def is_done(self, position: Position) -> bool:
        """Tell whether neither a step nor the last validation is left, which a stop may have cut short."""
        step = position.step
        if position.validation_loss is None and step <= self.last_step and self.validation_due(step):
            return False
        return step >= self.last_step or self.out_of_patience(position)

    def hash_due(self, step: int) -> bool:
        return self.state_hash is not None and step % self.state_hash == 0

    @advisory("remaining time")
    def remaining(self, step: int) -> Remaining:
        """Return the work of this job from a step on, its own validation and checkpoint included."""
        return Remaining(
            steps=self.last_step - step,
            validations=count_due(step, self.last_step, self.checkpoint, self.validation) if self.validation else 0,
            checkpoints=count_due(step, self.last_step, self.checkpoint),
        )


@attrs.define(kw_only=True)
class StopRequest:
    """Agreement to stop: `asked` is set by a signal; --max-hours and --max-usd leave room for a whole step."""

    ranks: Ranks
    asked: threading.Event
    budget: Budget
    ledger: TimeLedger
    state: TrainState
    intervals: Intervals
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
        """The cause of the stop: "signal", or the option of the limit."""
        left = None if self._signalled else self.budget.seconds_left(self.ledger)
        return "signal" if left is None else left[1]

    @property
    def reason(self) -> Reason:
        """The cause of the stop, as exit.json has it."""
        return "stopped" if self.cause == "signal" else "out-of-budget"

    def limit_reached(self) -> bool:
        """Tell whether the budget might not hold another step, with the validation and the save that follow it."""
        if self.budget.seconds_left(self.ledger) is None:
            return False  # whatever becomes of what is measured for a limit
        seconds = self.saving.seconds_to_stop
        if self.intervals.validation_due(self.state.position.step + 1):
            expected = self.validation_steps * self.ledger.longest_step_seconds()
            seconds += self.ledger.typical_seconds("validation") or expected
        return self.budget.reached(self.ledger, seconds)
