"""The end of a training job: find out whether the budget ended it, or why it failed."""

from pathlib import Path

from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED
from experiments.shared.run_progress import RunProgress, Target
from training.supervision.training_process import JobEnd
from training.telemetry.budget import LIMITS

TABLE_SECONDS = 3.0  # this part of the budget is reserved for writing the table at the end of experiment.py
# A job starts only if the budget has this much time left. A job needs 15 s to import its modules, load the tokens,
# train one step and save a checkpoint.
LEAST_SECONDS = 15.0 + TABLE_SECONDS


def ended_over_budget(end: JobEnd, progress: RunProgress, seconds_left: float | None) -> bool:
    """Return whether the budget ended a job. `seconds_left` is the rest of the budget, or None without a budget.

    A trial may run an earlier version of train.py, which does not state why it ended. If such a job was stopped, its
    metrics name the limit. If such a job failed when too little of the budget was left, the budget is assumed to be the
    cause.
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
