"""Targets of a pool: runs on their way to a step."""

from enum import Enum
from pathlib import Path

import attrs

from experiments.shared.run_progress import RunProgress, plan_run, read_progress


class RunEnd(Enum):
    """End of a run, as far as it was wanted."""

    DONE = "done"
    PAUSED = "paused"  # at `until_step`
    DIVERGED = "diverged"


@attrs.frozen(kw_only=True)
class PlannedRun:
    """A run directory to be trained."""

    directory: Path
    until_step: int | None = None  # pause there with a checkpoint (--max-steps); None: to the end


@attrs.define
class Target:
    """A run on its way to a step."""

    run: PlannedRun
    last_step: int  # of the whole run
    step: int  # to reach
    validates: bool
    done: bool = False

    @property
    def name(self) -> str:
        return self.run.directory.name

    def end(self, progress: RunProgress) -> RunEnd | None:
        """Return how the run has ended; None where it is to be trained."""
        if progress.diverged is not None:
            return RunEnd.DIVERGED
        if not progress.reached(self.step, self.last_step, validates=self.validates):
            return None
        return RunEnd.DONE if self.step == self.last_step else RunEnd.PAUSED

    def place(self) -> str:
        """Return how far the run is, as text."""
        steps = read_progress(self.run.directory).steps
        return f"at step {steps:,} of {self.last_step:,}" if steps else "not begun"


def make_target(run: PlannedRun, ranks: int) -> Target:
    """Return the target of a run. Raises BadInput where it could not be trained."""
    plan = plan_run(run.directory, ranks)
    step = plan.steps if run.until_step is None else min(run.until_step, plan.steps)
    return Target(run=run, last_step=plan.steps, step=step, validates=plan.validation_sequences > 0)
