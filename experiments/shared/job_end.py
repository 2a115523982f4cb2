"""The end of a training job of a pool: whether the budget ended it, and its failure in words."""

from pathlib import Path

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED
from experiments.shared.run_progress import RunProgress, Target
from training.supervision.training_process import JobEnd
from training.telemetry.budget import LIMITS

TABLE_SECONDS = 3.0  # kept of the budget for the end of experiment.py: the table
# Least rest of the budget to start a job with: 15 s for imports, tokens, a step and a checkpoint, and then the table
LEAST_SECONDS = 15.0 + TABLE_SECONDS


def ended_over_budget(end: JobEnd, progress: RunProgress, seconds_left: float | None) -> bool:
    """Tell whether a job has ended because of the budget. `seconds_left`: of that, None without one.

    A train.py of an earlier version, which a trial may run, gives no reason. If such a job was stopped, its metrics
    name the limit; if it has failed, the budget is the cause if too little of it is left.
    """
    if end.reason is not None:
        return end.reason == "out-of-budget"
    if end.status == EXIT_STOPPED:
        return progress.stopped_by in LIMITS
    return end.status == EXIT_ERROR and seconds_left is not None and seconds_left < LEAST_SECONDS


def failure_of(target: Target, end: JobEnd, log: Path) -> str:
    """Return why a job has not brought its run to the target. `log`: the job's output."""
    if end.status == EXIT_DONE:
        return (
            f"{target.name}: has no validation loss at step {target.step:,}: it was trained beyond by hand; move "
            f"{target.directory} away to train it again"
        )
    return f"{target.name}: training failed: {end.problem}; its output: {log}"
