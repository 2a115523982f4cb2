"""Step intervals: after which steps a run logs, validates, saves and hashes its state."""

import attrs

from common.errors import advisory
from training.config.batch_plan import count_due
from training.telemetry.time_ledger import Remaining


@attrs.frozen(kw_only=True)
class Intervals:
    """Intervals in steps. A `step` here counts the updates done."""

    log: int
    checkpoint: int
    validation: int | None  # None: no validation
    state_hash: int | None
    last_step: int  # where this job ends: the run's last step, or --max-steps

    def log_due(self, step: int) -> bool:
        """Tell whether to log: at intervals, and the first and the last step."""
        return step % self.log == 0 or step in (1, self.last_step)

    def checkpoint_due(self, step: int) -> bool:
        """Tell whether to save: at intervals and at the end."""
        return step > 0 and (step % self.checkpoint == 0 or step == self.last_step)

    def validation_due(self, step: int) -> bool:
        """Tell whether to validate: at intervals, before a run's first step, with each checkpoint."""
        return self.validation is not None and (step % self.validation == 0 or self.checkpoint_due(step))

    def hash_due(self, step: int) -> bool:
        return self.state_hash is not None and step % self.state_hash == 0

    @advisory("remaining time")
    def remaining(self, step: int) -> Remaining:
        """Return the work of this job from a step on, its own validation and checkpoint included."""
        intervals = (self.checkpoint,) if self.validation is None else (self.checkpoint, self.validation)
        return Remaining(
            steps=self.last_step - step,
            validations=0 if self.validation is None else count_due(step, self.last_step, *intervals),
            checkpoints=count_due(step, self.last_step, self.checkpoint),
        )
