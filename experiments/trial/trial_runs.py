"""The runs of a trial: one step and a short run of both commits, then pairs of runs until the rule ends the trial.

A `probe` trains one step. It shows whether the change breaks training, how many steps the commit plans, and on which
tokens it measures its loss. If the bits of the probes are equal, each side trains a `short` run, which goes through the
complete schedule in a few steps. The runs of a pair have the same seed.
"""

import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from common.checks import integer
from common.errors import BadInput
from common.json_files import read_json
from common.output import show
from common.text import quoted
from experiments.shared.experiment_files import show_results, write_run_directory
from experiments.shared.run_comparison import RecordedRun, check_same_measure, check_same_tokens
from experiments.shared.run_pool import PoolStopped, RunPool
from experiments.shared.run_progress import Target, describe_cost, measured_speed, read_progress
from experiments.shared.training_jobs import PoolOptions
from experiments.trial.trial import CODE, FOLDER, SIDES, Trial, differing_keys
from experiments.trial.trial_log import begin, finish, read_trials, rule_of
from experiments.trial.trial_rule import VERDICTS, TrialVerdict, seeds_of
from experiments.trial.trial_table import SideRun, TrialTable
from training.checkpoints.directory import STATE, checkpoints_of, name_of
from training.checkpoints.run_record import RESOLVED
from training.config.batch_plan import make_plan
from training.config.train_config import PLUMBING_KEYS, load_run
from training.data.locate_tokens import lengths_at_hand
from training.telemetry.metrics_log import TRIAL, Detail, Metric, RunEvent, event_of, read_metrics

SHORT_STEPS = 16


def describe_trial(trial: Trial, pairs: int | None, options: PoolOptions) -> list[str]:
    """Return lines for --dry-run with the rule and the cost of a trial. Raise BadInput as `rule_of` does."""
    number, rule = rule_of(read_trials(FOLDER), trial.name, pairs)
    run, most_runs = load_run(trial.run, ()), 2 * rule.looks[-1]
    plan = make_plan(run.train, run.model.context_length, options.ranks, lengths_at_hand(run.train))
    tokens, speed = most_runs * plan.train_tokens, measured_speed(trial.run)
    return [
        f"{trial.output}: files that differ: {len(trial.changed_files):,}",
        f"copies: base {trial.sizes['base']}, candidate {trial.sizes['candidate']}; not committed: {trial.uncommitted}",
        f"first, both sides train 1 step, and then a run of {short_steps(plan.steps)} steps; if the bits are equal, "
        "the trial ends",
        rule.describe(number),
        f"at most {most_runs} runs, {tokens:,} tokens",
        describe_cost(tokens, "tokens/s", [speed] if speed else [], options.price_per_hour),
    ]


def train_trial(pool: RunPool, trial: Trial, pairs: int | None) -> Callable[[], int]:
    """Train the runs that the verdict needs. Return a function that shows the verdict and returns its exit status.

    Raise BadInput if a run fails, or if the losses cannot be compared.
    """
    os.environ["GIT_CEILING_DIRECTORIES"] = str(CODE)  # git must not report the surrounding repository's commit
    table = TrialTable(trial=trial, notes=trial.notes())
    try:
        pool.reach(_targets(trial, "probe", dict.fromkeys(SIDES, 1), {}, ends_run=False))
        check_measured(trial, ["probe"])
        base = trial.directory("base", "probe") / RESOLVED
        steps = {side: recorded_number(trial.directory(side, "probe") / RESOLVED, "steps") for side in SIDES}
        plumbing = {key.partition(".")[2] for key in differing_keys(trial.sections)} <= PLUMBING_KEYS
        if plumbing and steps["base"] == steps["candidate"] and _same_state(trial, "probe", 1):
            short = short_steps(steps["base"])
            sequences, context = (recorded_number(base, key) for key in ("global_batch_size", "model.context_length"))
            few = {"min_train_tokens": short * sequences * context}
            changes = few if short < steps["base"] else {}
            pool.reach(_targets(trial, "short", dict.fromkeys(SIDES, short), changes))
            check_measured(trial, ["probe", "short"])
            if _same_state(trial, "short", short):
                same = TrialVerdict("same bits", describe_same_bits(short, steps["base"]))
                return _end(trial, attrs.evolve(table, judgment=same, compared_steps=short, steps=steps["base"]))
        number, rule = begin(FOLDER, trial.name, pairs, {"run": str(trial.run), **trial.revisions})
        notes = [*table.notes, *describe_lengths(trial, steps)]
        table = attrs.evolve(table, number=number, rule=rule, notes=notes)
        for look in rule.looks:
            names = [f"seed-{seed}" for seed in seeds_of(trial.name)[:look]]
            seeds = zip(names, seeds_of(trial.name), strict=False)
            targets = [_targets(trial, name, steps, {"random_seed": seed}) for name, seed in seeds]
            pool.reach([target for pair in targets for target in pair])
            check_measured(trial, ["probe", *names])
            table = attrs.evolve(table, pairs=[[_side_run(target) for target in pair] for pair in targets])
            if (judgment := table.judge()) is not None:
                return _end(trial, attrs.evolve(table, judgment=judgment))
    except PoolStopped as stopped:
        judgment = TrialVerdict("cannot tell yet", f"cannot tell yet: {stopped}")
        return partial(_show, trial, attrs.evolve(table, judgment=judgment))
    raise AssertionError("the last look has a verdict")


def recorded_number(path: Path, name: str) -> int:
    """Return a whole number above 0 that a run has recorded as KEY or SECTION.KEY.

    Raise BadInput if the record has no such number.
    """
    section, _, key = name.rpartition(".")
    record = read_json(path)
    values = record.get(section) if section else record
    number = values.get(key) if isinstance(values, dict) else None
    if not integer(1).holds(number):
        raise BadInput(
            f"{path}: {name}: got {quoted(number)}, expected a whole number above 0; this record was written by the "
            "code of the trained commit"
        )
    return int(number)  # type: ignore[arg-type]  # the check above shows that it is a number


def short_steps(steps: int) -> int:
    """Return the number of steps of the short run that compares bits: at most SHORT_STEPS."""
    return min(SHORT_STEPS, steps)


def describe_same_bits(short: int, steps: int) -> str:
    """Return the text of the verdict "same bits". It claims only what was compared: `short` of the `steps` steps."""
    equal = "same bits: equal weights, moments and validation losses"
    if short == steps:
        return f"{equal} after the whole run of {steps:,} steps"
    return (
        f"{equal} in a run shortened to {short:,} steps; the full run has {steps:,} steps, and anything that a "
        f"program does only after step {short:,} was not compared"
    )


def check_measured(trial: Trial, names: Sequence[str]) -> None:
    """Raise BadInput if the records of the runs show that their losses were measured on different tokens."""
    directories = [trial.directory(side, name) for name in names for side in SIDES]
    runs = [RecordedRun.read(directory) for directory in directories]
    check_same_tokens(runs)
    check_same_measure(runs)


def describe_lengths(trial: Trial, steps: Mapping[str, int]) -> Iterator[str]:
    """Yield notes if the sides differ in steps or tokens, or in the precision in which they measure the loss."""
    base, candidate = (RecordedRun.read(trial.directory(side, "probe")) for side in SIDES)
    if steps["base"] != steps["candidate"]:
        yield f"The base trains {steps['base']:,} steps, and the candidate trains {steps['candidate']:,}."
    if base.train_tokens != candidate.train_tokens:
        token_counts = (base.train_tokens, candidate.train_tokens)
        counts = ("unknown" if count is None else f"{count:,}" for count in token_counts)
        yield "Training tokens: base {}, candidate {}.".format(*counts)
    if base.conditions["precision"] != candidate.conditions["precision"]:
        precisions = base.conditions["precision"], candidate.conditions["precision"]
        yield "The loss of the base is measured in {}, and the loss of the candidate in {}.".format(*precisions)


def _targets(
    trial: Trial, name: str, steps: Mapping[str, int], changes: dict[str, Any], *, ends_run: bool = True
) -> list[Target]:
    """Write the run directory of each side, with the `changes` of train.json, and return the targets.

    `steps` has the step to which each side is trained. Unless `ends_run` is set, the run does not end at this step.
    """
    targets = []
    for side in SIDES:
        directory, sections = trial.directory(side, name), trial.sections[side]
        write_run_directory(directory, sections | {"train": sections["train"] | changes})
        last_step = steps[side] + (not ends_run)
        targets.append(Target(directory, last_step, steps[side], validates=True, code=CODE / trial.trees[side]))
    return targets


def _same_state(trial: Trial, name: str, step: int) -> bool:
    """Return whether the runs of both sides have the same weights, moments and validation losses after a step."""
    runs = [trial.directory(side, name) for side in SIDES]
    if any(read_progress(run).diverged for run in runs):
        return False
    states = [read_json(checkpoints_of(run) / name_of(step) / STATE).get("state_sha256") for run in runs]
    return (
        isinstance(states[0], str)
        and states[0] == states[1]
        and read_progress(runs[0]).losses == read_progress(runs[1]).losses
    )


def _side_run(target: Target) -> SideRun:
    """Return the loss, step time and memory of a run that has ended."""
    records = read_metrics(target.directory)
    ends = [record for record in records if event_of(record) == RunEvent.END]
    tokens = sum(source["tokens"] for record in ends for source in record[Detail.SOURCES])
    speeds = [record[Metric.TOKENS_PER_SECOND] for record in records if record.get(Metric.TOKENS_PER_SECOND)]
    peaks = [record[Metric.PEAK_MEMORY_BYTES] for record in records if record.get(Metric.PEAK_MEMORY_BYTES)]
    seconds = tokens / target.step / statistics.median(speeds) if speeds else None
    return read_progress(target.directory).loss_at(target.step), seconds, max(peaks, default=None)


def _end(trial: Trial, table: TrialTable) -> Callable[[], int]:
    finish(FOLDER, trial.name, table.judgment.verdict, table.judgment.text)
    return partial(_show, trial, table)


def _show(trial: Trial, table: TrialTable) -> int:
    """Print and write the table and its record, and return the verdict's exit status. The record is printed last."""
    base, candidate = trial.revisions.values()
    show_results(table.text, table.record, trial.output, TRIAL, f"{candidate} against {base} on {trial.run}")
    show(json.dumps(table.record()))
    return VERDICTS[table.judgment.verdict]
