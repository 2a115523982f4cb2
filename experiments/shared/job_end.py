"""The end of a training job of a pool: whether the budget ended it, and the message if it failed."""

from pathlib import Path

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED
from experiments.shared.run_progress import RunProgress, Target
from training.supervision.training_process import JobEnd
from training.telemetry.budget import LIMITS

TABLE_SECONDS = 3.0  # part of the budget that is reserved for the end of experiment.py, which writes the table
# A job starts only if this much time remains: 15 s for imports, tokens, a step and a checkpoint, and then the table.
LEAST_SECONDS = 15.0 + TABLE_SECONDS


def ended_over_budget(end: JobEnd, progress: RunProgress, seconds_left: float | None) -> bool:
    """Return whether the budget ended a job. `seconds_left` is the rest of the budget, None without a budget.

    A train.py of an earlier version, which a trial may run, gives no reason. If such a job was stopped, its metrics
    name the limit. If it failed, the budget is assumed to be the cause if too little of it is left.
    """
    if end.reason is not None:
        return end.reason == "out-of-budget"
    if end.status == EXIT_STOPPED:
        return progress.stopped_by in LIMITS
    return end.status == EXIT_ERROR and seconds_left is not None and seconds_left < LEAST_SECONDS


def failure_of(target: Target, end: JobEnd, log: Path) -> str:
    """Return why a job ended before its run reached the target. `log` is the file with the job's output."""
    if end.status == EXIT_DONE:
        return (
            f"{target.name}: has no validation loss at step {target.step:,}, because it was trained past this step "
            f"outside the experiment; move {target.directory} away to train it again"
        )
    return f"{target.name}: training failed: {end.problem}; see its output in {log}"
