"""Limits of a job: whether the budget still holds the next step, and the validation and saves that follow it."""

import attrs

from training.planning.budget import Budget
from training.saving import Saving
from training.state import TrainState
from training.step_intervals import Intervals
from training.telemetry.time_ledger import TimeLedger


@attrs.frozen(kw_only=True)
class Limits:
    """--max-hours and --max-usd of a job that trains."""

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

    def stopped_by(self, *, signalled: bool) -> str:
        """Return the cause of a stop: "signal", or the option of the limit."""
        left = None if signalled else self.budget.seconds_left(self.ledger)
        return "signal" if left is None else left[1]
