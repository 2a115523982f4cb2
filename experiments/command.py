"""The commands sweep, ladder and trial of experiment.py: the options of each command, and how it trains its runs."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import attrs

from common.arguments import Command, option
from common.checks import integer
from common.errors import EXIT_STOPPED, BadInput
from common.option_rules import OptionRules
from common.output import Notice, show, warning
from common.text import dollars
from experiments.shared.training_jobs import PoolOptions, describe_jobs
from training.telemetry.budget import USD
from training.telemetry.metrics_log import LADDER, SWEEP, TRIAL, result_files

if TYPE_CHECKING:
    from experiments.shared.run_pool import RunPool


POOL = "--at-once --ranks --device --price-per-hour --max-hours --max-usd"
NEEDS = {"--max-usd": "--price-per-hour"}
REASONS_NEEDED = {"--max-usd": "the price of the machine"}


def _rules(more: str) -> OptionRules:
    """Return the option rules of a command that uses the options in POOL and `more`, also with --dry-run."""
    used = f"{POOL} {more}".rstrip()
    return OptionRules(
        work="training", uses=used, modes={"--dry-run": used}, needs=NEEDS, reasons_needed=REASONS_NEEDED
    )


@attrs.frozen(kw_only=True)
class ExperimentCommand:
    """The options that all commands have."""

    pool: PoolOptions = attrs.field(factory=PoolOptions)
    dry_run: Annotated[bool, option("print the runs, their tokens and cost; do not train")] = False


@attrs.frozen(kw_only=True)
class FileCommand(ExperimentCommand):
    """The options of an experiment that is described by a file."""

    file: Annotated[Path, option("JSON file of the experiment", name="FILE")] = attrs.field(kw_only=False)
    output: Annotated[
        Path | None, option("directory of the runs and results; default: the file's name without .json", "DIR")
    ] = None


@attrs.frozen(kw_only=True)
class SweepCommand(FileCommand):
    """Train variants of a run with several seeds, and separate real differences from luck."""

    option_rules: ClassVar[OptionRules] = OptionRules(
        work="training",
        uses=f"{POOL} --output",
        modes={
            "--dry-run": f"{POOL} --output",
            "--print-commands": "--output --ranks --device",
            "--collect": "--output --ranks --device",
        },
        needs=NEEDS,
        reasons_unused={
            "--print-commands": dict.fromkeys(
                ("--max-hours", "--max-usd"), "it limits training on this machine, not on others"
            )
        },
        reasons_needed=REASONS_NEEDED,
    )
    print_commands: Annotated[
        bool, option("write the run directories and print a command for each run, for Slurm or several machines")
    ] = False
    collect: Annotated[bool, option("print the table of the runs trained so far; do not train")] = False


@attrs.frozen(kw_only=True)
class LadderCommand(FileCommand):
    """Train small sizes of a run, fit a loss law, and forecast the run's loss."""

    option_rules: ClassVar[OptionRules] = _rules("--output --best-for")
    best_for: Annotated[
        float | None, option("also print the best model size for this much money on each machine", "USD", check=USD)
    ] = None


REVISION = "a git revision, or . for the working tree"


@attrs.frozen(kw_only=True)
class TrialCommand(ExperimentCommand):
    """Train a run with the code of two commits and several seeds, and judge the change."""

    option_rules: ClassVar[OptionRules] = _rules("--pairs")
    base: Annotated[str, option(f"what to compare with: {REVISION}", name="BASE")] = attrs.field(kw_only=False)
    candidate: Annotated[str, option(f"the change: {REVISION}", name="CANDIDATE")] = attrs.field(kw_only=False)
    run_directory: Annotated[Path, option("run directory; each commit trains its own version", name="RUN")] = (
        attrs.field(kw_only=False)
    )
    pairs: Annotated[
        int | None,
        option(
            "train N pairs of runs and judge them once at the end; default: enough pairs to find a difference of three "
            "seed deviations, with an early stop if the rule allows it",
            "N",
            check=integer(3, 999),
        ),
    ] = None


COMMANDS = {
    SWEEP: Command(SweepCommand, __name__, "run_sweep"),
    TRIAL: Command(TrialCommand, __name__, "run_trial"),
    LADDER: Command(LadderCommand, __name__, "run_ladder"),
}


def run_sweep(command: SweepCommand) -> int | None:
    """Train the missing runs of a sweep, and print the table."""
    from experiments.shared.experiment_files import check_results, missing_tokens, output_of
    from experiments.sweep import variant_runs
    from experiments.sweep.measured_loss import check_unseen
    from experiments.sweep.sweep_file import read_sweep
    from training.hardware.usable_gpus import choose_device

    sweep, output = read_sweep(command.file), output_of(command.file, command.output)
    check_results(output, SWEEP)
    missing = next(filter(None, (missing_tokens(sweep.file, variant.run.train) for variant in sweep.variants)), None)
    runs = variant_runs.runs_of(sweep, output, command.pool.ranks)
    if command.collect:
        if not output.is_dir():
            raise BadInput(f"{output}: no such directory; train the sweep first, or pass its --output")
        variant_runs.show_sweep(sweep, runs, output, choose_device(command.pool.device))
        return None
    variant_runs.check_rungs(sweep, runs)
    trains_here = not (command.print_commands or command.dry_run)
    variant_runs.check_variants(sweep, runs, choose_device(command.pool.device) if trains_here else None)
    if sweep.measure is not None and missing is None and not command.dry_run:
        check_unseen(sweep.measure, [variant.run.train for variant in sweep.variants])
    if command.print_commands:
        commands = variant_runs.shell_commands(sweep, runs, command.pool)
        variant_runs.write_runs(runs)
        print("\n".join(commands))
        return None
    device, price = choose_device(command.pool.device), command.pool.price_per_hour
    plan = variant_runs.describe_runs(sweep, runs, price, device) if command.dry_run else []
    train = partial(variant_runs.train_sweep, sweep=sweep, runs=runs, output=output, device=device)
    return execute(command, output, plan, missing, train)


def run_ladder(command: LadderCommand) -> int | None:
    """Train the missing runs of a ladder, print the results, and write the target's forecast."""
    from experiments.ladder.forecast import check_forecast, write_forecast
    from experiments.ladder.ladder_file import read_ladder
    from experiments.ladder.ladder_table import train_ladder
    from experiments.ladder.loss_law import NoForecast
    from experiments.ladder.trunk import describe_plan
    from experiments.shared.experiment_files import check_results, missing_tokens, write_or_remove

    ladder = read_ladder(command.file, command.output, command.pool.ranks)
    missing = missing_tokens(command.file, ladder.target.train)
    check_results(ladder.output, LADDER)
    check_forecast(ladder.target.directory)
    plan = describe_plan(ladder, command.pool.price_per_hour)  # raises an error if any run cannot be trained
    if command.best_for is not None:
        plan.append(f"then the best size for {dollars(command.best_for)} on each machine")
    try:
        return execute(
            command, ladder.output, plan, missing, partial(train_ladder, ladder=ladder, usd=command.best_for)
        )
    except NoForecast:  # an earlier call's forecast and results are no longer valid
        write_forecast(ladder.target.directory, None)
        for path in result_files(ladder.output, LADDER):
            write_or_remove(path, None)
        raise


def run_trial(command: TrialCommand) -> int | None:
    """Train pairs of runs until the rule ends the trial, print the verdict, and return the verdict's exit status."""
    from experiments.shared.experiment_files import check_results
    from experiments.trial.checkout import Snapshots
    from experiments.trial.trial import Trial
    from experiments.trial.trial_runs import describe_trial, train_trial

    with Snapshots() as snapshots:
        trial = Trial.of(snapshots, command.base, command.candidate, command.run_directory)
        check_results(trial.output, TRIAL)
        plan = describe_trial(trial, command.pairs, command.pool) if command.dry_run else []
        if not command.dry_run:
            trial.check_out(snapshots)
    return execute(command, trial.output, plan, None, partial(train_trial, trial=trial, pairs=command.pairs))


def execute(
    command: ExperimentCommand,
    output: Path,
    plan: Sequence[str | Notice],
    missing: str | None,
    train: "Callable[[RunPool], Callable[[], int | None]]",
) -> int | None:
    """Train the runs and show the results; with --dry-run, only print the plan. Return the exit status.

    `missing` is a line about a dataset that cannot be found, or None.
    """
    from common.files import writing
    from experiments.shared.run_pool import PoolStopped, RunPool

    if command.dry_run:
        show(*plan, *describe_jobs(command.pool), *([warning(missing)] if missing else []))
        return None
    if missing is not None:
        raise BadInput(missing)
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    try:
        with RunPool(output, command.pool) as pool:
            show_results = train(pool)
    except PoolStopped as stopped:
        show("", f"experiment.py: {stopped}")
        return EXIT_STOPPED
    return show_results()  # called outside the pool, so that Ctrl-C interrupts it
