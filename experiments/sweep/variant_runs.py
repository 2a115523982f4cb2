"""Runs of a sweep: a directory for each variant and seed."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import torch

from common.errors import BadInput, quoted
from common.json_files import read_json
from experiments.shared.experiment_files import (
    BUCKET,
    Sections,
    check_unchanged,
    counted,
    write_run_directory,
)
from experiments.shared.pool_options import PoolOptions
from experiments.shared.run_progress import measured_speed, read_progress, time_and_cost
from experiments.shared.training_process import train_command
from experiments.sweep.sweep_file import Sweep, Variant, run_name
from experiments.sweep.sweep_table import describe_power
from experiments.sweep.verdicts import VariantResult
from training.config.batch_plan import Plan, make_plan
from training.config.train_config import KEYS, PLUMBING_KEYS, recipe
from training.data.locate_tokens import lengths_at_hand
from training.precision import resolve
from training.schedule import learning_rate
from training.telemetry.budget import Budget

# Keys of train.json that a plan resolves to steps, sequences of a batch, and learning rates
RESOLVED_KEYS = (
    *("min_train_tokens", "global_batch_size", "schedule_learning_rate"),
    *("warmup_period_percent", "decay_period_percent", "final_learning_rate_percent"),
)
SAMPLED_STEPS = 1000  # of a schedule, which tell it from another


@attrs.frozen(kw_only=True)
class VariantRun:
    """A variant with one seed."""

    variant: Variant
    seed: int
    directory: Path
    sections: Sections  # model.json and train.json
    plan: Plan


def runs_of(sweep: Sweep, output: Path, ranks: int) -> list[VariantRun]:
    """Return all runs, checked, variant by variant; nothing is written. Raises BadInput for one that could not run."""
    base = {section: read_json(sweep.base / f"{section}.json") for section in KEYS}
    base["train"].pop(BUCKET, None)
    lengths: Mapping[str, int | None] | None = None
    runs = []
    for variant in sweep.variants:
        changes, run = sweep.changes | variant.changes, variant.run
        lengths = lengths or lengths_at_hand(run.train, None)
        plan = make_plan(run.train, run.model.context_length, ranks, lengths)
        for seed in sweep.seeds:
            all_changes = {**changes, "train.random_seed": seed}
            sections = {section: dict(values) for section, values in base.items()}
            for name, value in all_changes.items():
                section, _, key = name.partition(".")
                sections[section][key] = value
            directory = output / run_name(variant.name, seed)
            check_unchanged(directory, sections)
            runs.append(VariantRun(variant=variant, seed=seed, directory=directory, sections=sections, plan=plan))
    return runs


def check_variants(sweep: Sweep, runs: Sequence[VariantRun], device: str | None) -> None:
    """Raise BadInput where two variants train the same: they would count as a comparison, and find luck alone.

    `device`: "cpu" or "cuda", for precision auto; None: of other machines.
    """
    seen: dict[str, Variant] = {}
    for run in runs:
        variant = run.variant
        other = seen.setdefault(_trained(run, device), variant)
        if other is not variant:
            plumbing = ", ".join(key for key in variant.changes if key.partition(".")[2] in PLUMBING_KEYS)
            advice = f"{plumbing}: no lever, it may stand in 'set', for all runs" if plumbing else "leave one out"
            raise BadInput(
                f"{sweep.file}: levers: {quoted(variant.name)} trains the same as {quoted(other.name)}; {advice}"
            )


def _trained(run: VariantRun, device: str | None) -> str:
    """Return all that decides on a run's result but its seed, resolved: the same for two that train the same."""
    train, plan = run.variant.run.train, run.plan
    keys = recipe(attrs.asdict(run.variant.run.model), train.flat())
    for key in RESOLVED_KEYS:
        del keys["train"][key]
    if device is not None:
        keys["train"]["precision"] = resolve(train.execution.precision, torch.device(device))
    between = max(1, plan.steps // SAMPLED_STEPS)
    rates = [learning_rate(plan.schedule, step) for step in (*range(0, plan.steps, between), max(0, plan.steps - 2))]
    return json.dumps([keys, plan.steps, plan.layout.global_batch_size, rates])


def write_runs(runs: list[VariantRun]) -> None:
    """Write the run directories that are not there yet."""
    for run in runs:
        write_run_directory(run.directory, run.sections)


def results_of(sweep: Sweep, runs: list[VariantRun], stopped: Mapping[str, int]) -> list[VariantResult]:
    """Return the final validation losses of each variant, of the runs that have ended."""
    results = []
    for variant in sweep.variants:
        losses: dict[int, float | None] = {}
        for run in runs:
            if run.variant is variant:
                progress = read_progress(run.directory)
                steps = progress.ended or run.plan.steps  # the plan's may depend on --ranks
                loss = progress.losses.get(steps)
                if progress.diverged is not None or (loss is not None and not math.isfinite(loss)):
                    losses[run.seed] = None
                elif loss is not None and (progress.ended is not None or progress.steps >= steps):
                    losses[run.seed] = loss
        results.append(VariantResult(name=variant.name, losses=losses, stopped_at=stopped.get(variant.name)))
    return results


def describe_runs(sweep: Sweep, runs: list[VariantRun], options: PoolOptions) -> list[str]:
    """Return the runs, their tokens, time and cost where known, and the difference that their number can find."""
    tokens = sum(run.plan.train_tokens for run in runs)
    lines = [
        *(f"{run.directory}: {run.plan.steps:,} steps, {run.plan.train_tokens:,} tokens" for run in runs),
        f"{len(sweep.variants)} variants x {counted(len(sweep.seeds), 'seed')}: {len(runs)} runs, {tokens:,} tokens"
        + (" at most: the rule stops losers early" if sweep.halving else ""),
    ]
    speeds = [
        speed for path in (sweep.base, *(run.directory for run in runs)) if (speed := measured_speed(path)) is not None
    ]
    if speeds:
        total = time_and_cost(tokens, speeds, options.price_per_hour)
        lines.append(f"{total} one after the other, at the tokens/s of {counted(len(speeds), 'earlier run')}")
    else:
        lines.append("time and cost: not known before a run of the base or of this sweep has ended")
    return [*lines, describe_power(sweep)]


def shell_commands(sweep: Sweep, runs: list[VariantRun], options: PoolOptions) -> list[str]:
    """Return a command for each run that has not ended. Raises BadInput with a halving rule."""
    if sweep.halving is not None:
        raise BadInput(f"{sweep.file}: halving: needs the losses of all runs at once; not with --print-commands")
    if options.budget != Budget():
        raise BadInput("--print-commands: --max-hours and --max-usd bound what this machine trains, not other machines")
    missing = [run.directory for run in runs if read_progress(run.directory).ended is None]
    return [shlex.join(["python", *train_command(directory, options)]) for directory in missing]
