"""What the options of a command line would do, for train.py --dry-run in front of it."""

from collections.abc import Iterator
from pathlib import Path

from common.quantities import dollars
from common.redaction import redacted
from training.checkpoints.directory import check_wanted, checkpoints_of
from training.checkpoints.saved_state import find
from training.command import TrainCommand
from training.config.train_config import Run
from training.telemetry.time_ledger import read_earlier

LABEL = "options"


def describe_options(run: Run, command: TrainCommand, steps: int) -> list[str]:
    """Return a line for each option whose effect the arithmetic of the run does not show; `steps`: of the run.

    Raises BadInput if --resume names a checkpoint that does not exist.
    """
    local = run.train.checkpoints.checkpoints is None
    check_wanted(run.directory, command.options.resume, is_here=local)
    lines = [*_start(run.directory, command, local=local), *_job(command), *_end(run.directory, command, steps)]
    return [f"{LABEL if number == 0 else '':<13}{line}" for number, line in enumerate(lines)]


def _start(directory: Path, command: TrainCommand, *, local: bool) -> Iterator[str]:
    """Yield what decides how the run begins or resumes; `local`: it has checkpoints on this disk alone."""
    options = command.options
    checkpoint = None if options.resume == "never" else find(checkpoints_of(directory), options.resume)
    elsewhere = "" if local else " of this disk or a newer one of its bucket"
    begins = "begins with step 1" if checkpoint is None else f"resumes from {checkpoint}{elsewhere}"
    if options.resume == "never":
        yield "--resume never: archives earlier results and begins with step 1"
    elif options.resume != "auto":
        yield f"--resume {options.resume}: {begins}"
    if options.init_from is not None:
        uses = begins if checkpoint is not None else "begins with the weights of this model"
        yield f"--init-from {options.init_from}: {uses}"
    if options.allow_numerics_drift:
        yield "--allow-numerics-drift: resumes even if torch, the hardware or the micro-batch has changed"


def _job(command: TrainCommand) -> Iterator[str]:
    """Yield what changes how the job trains."""
    options = command.options
    if options.follow:
        yield "--follow: trains on token files that are still being written, as they come"
    if options.device is not None:
        where = "the CPU" if options.device == "cpu" else "GPUs, which --preflight checks"
        yield f"--device {options.device}: trains on {where}"
    if options.hash_every is not None:
        often = "after every step" if options.hash_every == 1 else f"every {options.hash_every:,} steps"
        yield f"--hash-every {options.hash_every}: writes the hash of weights and moments to the metrics {often}"
    if options.price_per_hour is not None:
        yield f"--price-per-hour {options.price_per_hour:g}: shows dollars spent and expected"


def _end(directory: Path, command: TrainCommand, steps: int) -> Iterator[str]:
    """Yield what ends the job, and what follows."""
    options, budget = command.options, command.options.budget
    if options.max_steps is not None:
        ends = f"stops after step {options.max_steps:,} of {steps:,} with a checkpoint"
        if options.max_steps >= steps:
            ends = f"changes nothing, because the run ends after step {steps:,}"
        yield f"--max-steps {options.max_steps}: {ends}"
    earlier = read_earlier(directory, 0.0)
    if budget.max_hours is not None:
        taken = f"{earlier.seconds / 3600:.3g} hours are taken"
        yield f"--max-hours {budget.max_hours:g}: stops with a checkpoint before that; {taken}"
    if budget.max_usd is not None:
        yield f"--max-usd {budget.max_usd:g}: stops with a checkpoint before that; {dollars(earlier.usd)} are spent"
    if options.then is not None:
        yield f"--then: runs {redacted(options.then)} once the job is done or stopped, saved and uploaded"
