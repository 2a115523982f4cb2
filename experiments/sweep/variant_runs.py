"""The runs of a sweep: a run directory for each variant and seed, trained according to the file's halving rule."""

import json
import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import attrs
import torch
from tqdm import tqdm

from common.errors import BadInput
from common.json_files import read_json
from common.output import Notice, note
from common.text import counted, quoted
from experiments.shared.experiment_files import (
    BUCKET,
    Sections,
    check_unchanged,
    write_run_directory,
)
from experiments.shared.run_comparison import (
    check_same_measure,
    check_same_tokens,
    describe_conditions,
    read_recorded,
)
from experiments.shared.run_pool import PoolStopped, RunPool
from experiments.shared.run_progress import describe_cost, measured_speed, read_progress
from experiments.shared.training_jobs import PoolOptions, train_command
from experiments.sweep.measured_loss import measure_run
from experiments.sweep.sweep_file import BASE, Sweep, Variant, run_name
from experiments.sweep.sweep_table import SweepTable, VariantResult, describe_power
from training.config.batch_plan import Plan, make_plan
from training.config.train_config import KEYS, PLUMBING_KEYS, recipe
from training.data.locate_tokens import lengths_at_hand
from training.precision import resolve
from training.schedule import learning_rate
from training.telemetry.metrics_log import METRICS

# A plan converts these keys of train.json into a number of steps, sequences per batch, and learning rates.
RESOLVED_KEYS = (
    *("min_train_tokens", "global_batch_size", "schedule_learning_rate"),
    *("warmup_period_percent", "decay_period_percent", "final_learning_rate_percent"),
)
SAMPLED_STEPS = 1000  # schedules are compared at about this number of sampled steps


@attrs.frozen(kw_only=True)
class VariantRun:
    """The run of a variant with one seed."""

    variant: Variant
    seed: int
    directory: Path
    sections: Sections  # contents of model.json and train.json
    plan: Plan

    def rung_step(self, share: float) -> int:
        """Return the step of a rung. At this step, the run pauses and validates."""
        return max(1, round(share * self.plan.steps))

    def rung_loss(self, share: float) -> float | None:
        """Return the validation loss at a rung, with the same special values as `RunProgress.loss_at`."""
        return read_progress(self.directory).loss_at(self.rung_step(share))


def runs_of(sweep: Sweep, output: Path, ranks: int) -> list[VariantRun]:
    """Return all runs of a sweep, variant by variant, without writing any files.

    Raise BadInput if a run cannot be trained, or if a run was started with different settings.
    """
    base = {section: read_json(sweep.base / f"{section}.json") for section in KEYS}
    base["train"].pop(BUCKET, None)
    runs = []
    for variant in sweep.variants:
        lengths = lengths_at_hand(variant.run.train)
        plan = make_plan(variant.run.train, variant.run.model.context_length, ranks, lengths)
        for seed in sweep.seeds:
            sections = {section: dict(values) for section, values in base.items()}
            for name, value in {**sweep.changes, **variant.changes, "train.random_seed": seed}.items():
                section, _, key = name.partition(".")
                sections[section][key] = value
            directory = output / run_name(variant.name, seed)
            check_unchanged(directory, sections)
            runs.append(VariantRun(variant=variant, seed=seed, directory=directory, sections=sections, plan=plan))
    return runs


def check_rungs(sweep: Sweep, runs: Sequence[VariantRun]) -> None:
    """Raise BadInput if two rungs are at the same step, or if a rung is at the last step.

    Also raise BadInput if a run was trained past a rung without a validation at that step.
    """
    for run in runs:
        steps = [*map(run.rung_step, sweep.halving.rungs), run.plan.steps]
        if any(low >= high for low, high in pairwise(steps)):
            raise BadInput(
                f"{sweep.file}: halving: {run.directory.name}: the rungs are at steps "
                f"{', '.join(map(str, steps[:-1]))} of {run.plan.steps:,}, but they must be different steps before the "
                "last step; spread the rungs, or train more steps"
            )
    stopped = stopped_variants(sweep, runs)
    for share in sweep.halving.rungs:
        for run in runs:
            step, progress = run.rung_step(share), read_progress(run.directory)
            passed = run.variant.name not in stopped and max(progress.steps, progress.ended or 0) > step
            if passed and run.rung_loss(share) is None:
                raise BadInput(
                    f"{sweep.file}: halving: {run.directory.name} was trained past the rung at step {step:,} without a "
                    "validation there; remove the key, or choose another --output"
                )


def check_variants(sweep: Sweep, runs: Sequence[VariantRun], device: str | None) -> None:
    """Raise BadInput if two variants train in exactly the same way, because a difference between them would be luck.

    `device` is "cpu" or "cuda" if this machine is about to train the variants. None means that other machines may train
    them. The meaning of precision "auto" is then unknown, so it is treated as different from all other precisions.
    """
    for resolved_on in dict.fromkeys([None, device]):
        if (same := _same_variants(runs, resolved_on)) is None:
            continue
        variant, earlier = same
        plumbing = ", ".join(key for key in variant.changes if key.partition(".")[2] in PLUMBING_KEYS)
        advice = "remove one of them"
        if plumbing:
            advice = f"{plumbing} does not change results, so it cannot be a lever; put it into 'set', for all runs"
        where = ""
        if resolved_on is not None:
            where = f' on this machine, where the precision "auto" is "{resolve("auto", torch.device(resolved_on))}"'
            advice += ", or use --print-commands to train on other machines"
        raise BadInput(
            f"{sweep.file}: levers: {quoted(variant.name)} trains the same as {quoted(earlier.name)}{where}; {advice}"
        )


def _same_variants(runs: Sequence[VariantRun], device: str | None) -> tuple[Variant, Variant] | None:
    """Return two variants that train in the same way, the later variant first; None if there are no such variants."""
    first_variants: dict[str, Variant] = {}
    for run in runs:
        earlier = first_variants.setdefault(_training_settings(run, device), run.variant)
        if earlier is not run.variant:
            return run.variant, earlier
    return None


def _training_settings(run: VariantRun, device: str | None) -> str:
    """Return a text with everything that determines a run's result, except the seed.

    Settings are resolved first, so two runs with the same text train in the same way.
    """
    train, plan = run.variant.run.train, run.plan
    keys = recipe(run.variant.run.model, train)
    for key in RESOLVED_KEYS:
        del keys["train"][key]
    if device is not None:
        keys["train"]["precision"] = resolve(train.execution.precision, torch.device(device))
    stride = max(1, plan.steps // SAMPLED_STEPS)
    rates = [learning_rate(plan.schedule, step) for step in (*range(0, plan.steps, stride), max(0, plan.steps - 2))]
    return json.dumps([keys, plan.steps, plan.layout.global_batch_size, rates])


def write_runs(runs: Sequence[VariantRun]) -> None:
    """Write the run directories that do not exist yet."""
    for run in runs:
        write_run_directory(run.directory, run.sections)


def train_sweep(
    pool: RunPool, sweep: Sweep, runs: Sequence[VariantRun], output: Path, device: str
) -> Callable[[], None]:
    """Train all runs except those that the rule stops. Return a function that shows the results.

    Raise errors as `RunPool.train` does.
    """
    write_runs(runs)
    try:
        for share in (*sweep.halving.rungs, None):
            stopped = stopped_variants(sweep, runs)
            continuing = [run for run in runs if run.variant.name not in stopped]
            pool.train({run.directory: None if share is None else run.rung_step(share) for run in continuing})
    except PoolStopped:
        show_sweep(sweep, runs, output, None)
        raise
    return partial(show_sweep, sweep, runs, output, device)


def show_sweep(sweep: Sweep, runs: Sequence[VariantRun], output: Path, device: str | None) -> None:
    """Write and print the table of the runs that have been trained.

    `device` is used to measure losses for the key `measure`. If `device` is None, only losses that were measured before
    are shown.
    """
    warnings = check_records(sweep, runs)
    bar = tqdm(runs, "measured", unit="run", leave=False, disable=True if sweep.measure is None else None)
    losses = [final_losses(sweep, run, device) for run in bar]
    SweepTable.of(sweep, results_of(sweep, runs, losses), warnings).show(output)


def check_records(sweep: Sweep, runs: Sequence[VariantRun]) -> list[str]:
    """Return warnings about conditions that differ between the runs, according to their own records.

    Raise BadInput if their losses were not measured on the same tokens.
    """
    recorded, warnings = read_recorded(run.directory for run in runs if (run.directory / METRICS).exists())
    check_same_tokens(recorded)
    if sweep.measure is None:
        check_same_measure(recorded)
    levers = {key.partition(".")[2] for variant in sweep.variants for key in variant.changes}
    return [*warnings, *describe_conditions(recorded, levers)]


def stopped_variants(sweep: Sweep, runs: Sequence[VariantRun]) -> dict[str, int]:
    """Return the variants that the rule has stopped, with the step at which each was stopped.

    A rung is used only if every variant that was not stopped at an earlier rung has a loss there.
    """
    stopped: dict[str, int] = {}
    for share in sweep.halving.rungs:
        losses: dict[str, list[float]] = {}
        steps: dict[str, int] = {}
        for run in runs:
            if (name := run.variant.name) not in stopped and name != BASE:
                if (loss := run.rung_loss(share)) is None:
                    return stopped
                losses.setdefault(name, []).append(loss)
                steps[name] = run.rung_step(share)
        means = {name: statistics.fmean(values) for name, values in losses.items()}
        stopped |= {name: steps[name] for name in sweep.halving.losers(means)}
    return stopped


def final_losses(sweep: Sweep, run: VariantRun, device: str | None) -> list[float] | None:
    """Return a list with a run's final loss or, if the sweep has the key `measure`, the run's losses on all ranges.

    The loss is infinite if the run diverged. Return None if the loss is not known yet.
    """
    progress = read_progress(run.directory)
    steps = progress.ended or run.plan.steps  # the plan's number of steps may depend on --ranks
    loss = progress.loss_at(steps)
    if loss is None or not (math.isinf(loss) or progress.ended is not None or progress.steps >= steps):
        return None
    if math.isinf(loss) or sweep.measure is None:
        return [loss]
    return measure_run(sweep.measure, run.directory, steps, run.variant.run.train, device)


def results_of(sweep: Sweep, runs: Sequence[VariantRun], final: Sequence[list[float] | None]) -> list[VariantResult]:
    """Return the final losses of each variant. `final` has the result of `final_losses` for each run."""
    stopped = stopped_variants(sweep, runs)
    losses: dict[str, dict[int, float | None]] = {variant.name: {} for variant in sweep.variants}
    for run, run_losses in zip(runs, final, strict=True):
        if run_losses is not None:
            diverged = math.isinf(run_losses[0])
            loss = run_losses[0] if sweep.measure is None or diverged else sweep.measure.mean(run_losses)
            losses[run.variant.name][run.seed] = None if math.isinf(loss) else loss
    return [
        VariantResult(name=name, losses=losses_by_seed, stopped_at=stopped.get(name))
        for name, losses_by_seed in losses.items()
    ]


def describe_runs(
    sweep: Sweep, runs: Sequence[VariantRun], price_per_hour: float | None, device: str | None
) -> list[str | Notice]:
    """Return lines for --dry-run: the runs, their tokens, their time and cost if known, and the power of the sweep.

    `device` is the device on which this machine would train.
    """
    tokens = sum(run.plan.train_tokens for run in runs)
    speeds = [speed for path in (sweep.base, *(run.directory for run in runs)) if (speed := measured_speed(path))]
    return [
        *(f"{run.directory}: {run.plan.steps:,} steps, {run.plan.train_tokens:,} tokens" for run in runs),
        f"{len(sweep.variants)} variants x {counted(len(sweep.seeds), 'seed')}: {len(runs)} runs, {tokens:,} tokens"
        + (" at most, because the rule ends the runs of losing variants early" if sweep.halving.rungs else ""),
        describe_cost(tokens, "tokens/s", speeds, price_per_hour),
        describe_power(sweep),
        *_describe_same_here(sweep, runs, device),
    ]


def _describe_same_here(sweep: Sweep, runs: Sequence[VariantRun], device: str | None) -> list[Notice]:
    """If this machine would train two variants in the same way, return the error of `check_variants` as a note."""
    try:
        check_variants(sweep, runs, device)
    except BadInput as error:
        return [note(str(error))]
    return []


def shell_commands(sweep: Sweep, runs: Sequence[VariantRun], options: PoolOptions) -> list[str]:
    """Return a command for each run that has not ended. Raise BadInput if the sweep has a halving rule."""
    if sweep.halving.rungs:
        raise BadInput(
            f"{sweep.file}: halving: cannot be used with --print-commands, because the rule needs the losses of all "
            "runs during training; remove the key, or train here"
        )
    missing = [run.directory for run in runs if read_progress(run.directory).ended is None]
    return [shlex.join(["python", *train_command(directory, options)]) for directory in missing]
