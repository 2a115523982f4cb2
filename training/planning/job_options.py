"""Describe the effects of command-line options, one line each, for `train.py --dry-run`."""

from collections.abc import Iterator
from pathlib import Path

from common.redaction import redacted
from common.text import dollars, time_cost
from training.build import make_intervals
from training.checkpoints.directory import check_resume_name, checkpoints_of
from training.checkpoints.lookup import find_to_resume
from training.checkpoints.saved_state import read_state
from training.command import TrainCommand
from training.config.batch_plan import Plan
from training.config.train_config import Run
from training.state import Position
from training.telemetry.reporter import nothing_to_do
from training.telemetry.time_ledger import Earlier, read_earlier

LABEL = "options"


def describe_options(run: Run, command: TrainCommand, plan: Plan) -> list[str]:
    """Return a line for each option whose effect is not shown by the description of the plan.

    `plan` is the plan of the run. Raises BadInput if --resume names a checkpoint that does not exist.
    """
    local, resume = run.train.checkpoints.checkpoints is None, command.options.resume
    check_resume_name(run.directory, resume, is_here=local)
    checkpoint = None if resume == "never" else find_to_resume(checkpoints_of(run.directory), resume)
    lines = [*_start(command, checkpoint, local=local), *_job(command), *_end(run, command, plan, checkpoint)]
    return [f"{LABEL if number == 0 else '':<13}{line}" for number, line in enumerate(lines)]


def _start(command: TrainCommand, checkpoint: Path | None, *, local: bool) -> Iterator[str]:
    """Yield the options that decide how the run starts or resumes.

    `local` is true if the run's checkpoints are only on this disk, not in a bucket.
    """
    options = command.options
    alternative = "" if local else " on this disk, or from a newer checkpoint in the bucket"
    start = "starts with step 1" if checkpoint is None else f"resumes from {checkpoint}{alternative}"
    if options.resume == "never":
        yield "--resume never: archives earlier results and starts with step 1"
    elif options.resume != "auto":
        yield f"--resume {options.resume}: {start}"
    if options.init_from is not None:
        effect = start if checkpoint is not None else "starts with the weights of this model"
        yield f"--init-from {options.init_from}: {effect}"
    if options.allow_numerics_drift:
        yield "--allow-numerics-drift: resumes even if torch, the hardware or the micro-batch has changed"


def _job(command: TrainCommand) -> Iterator[str]:
    """Yield the options that change how the job trains."""
    options = command.options
    if options.follow:
        yield "--follow: trains on token files while they are still being written"
    if options.device is not None:
        where = "the CPU" if options.device == "cpu" else "GPUs, which --preflight checks"
        yield f"--device {options.device}: trains on {where}"
    if options.hash_every is not None:
        interval = "after every step" if options.hash_every == 1 else f"every {options.hash_every:,} steps"
        yield f"--hash-every {options.hash_every}: writes the hash of weights and moments to the metrics {interval}"
    if options.price_per_hour is not None:
        yield f"--price-per-hour {options.price_per_hour:g}: shows the dollars spent so far and the expected total"


def _end(run: Run, command: TrainCommand, plan: Plan, checkpoint: Path | None) -> Iterator[str]:
    """Yield the options that end the job, and the command that runs after it.

    `checkpoint` is the checkpoint from which the job resumes; None if the job starts with step 1.
    """
    options, budget = command.options, command.options.budget
    position = Position() if checkpoint is None else read_state(checkpoint).position
    if options.max_steps is not None:
        intervals = make_intervals(run.train, plan, options)
        effect = f"stops after step {options.max_steps:,} of {plan.steps:,} with a checkpoint"
        if options.max_steps >= plan.steps:
            effect = f"changes nothing, because the run ends after step {plan.steps:,}"
        elif intervals.is_done(position):
            out_of_patience = intervals.out_of_patience(position)
            reason = nothing_to_do(run.directory, plan.steps, position, out_of_patience=out_of_patience)
            effect = f"trains nothing: {reason}"
        yield f"--max-steps {options.max_steps}: {effect}"
    # `--resume never` moves the metrics to an archive, so the job counts time and cost from zero.
    earlier = Earlier() if options.resume == "never" else read_earlier(run.directory, position.elapsed_seconds)
    if budget.max_hours is not None:
        hours = earlier.seconds / 3600
        yield f"--max-hours {budget.max_hours:g}: {_limit(hours, budget.max_hours)}; {hours:.3g} hours used so far"
    if budget.max_usd is not None:
        usd = earlier.usd + (time_cost(earlier.unpriced_seconds, options.price_per_hour) or 0.0)
        yield f"--max-usd {budget.max_usd:g}: {_limit(usd, budget.max_usd)}; {dollars(usd)} spent so far"
    if options.then is not None:
        yield f"--then: runs {redacted(options.then)} after the last checkpoint is saved and uploaded"


def _limit(used: float, limit: float) -> str:
    if used < limit:
        return "stops with a checkpoint before this limit"
    return "trains nothing, because this limit is used up"
