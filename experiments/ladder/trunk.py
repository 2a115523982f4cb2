"""Trunks of a ladder: one warmup_stable_decay run of a size, and branches that decay earlier, one for each horizon.

Until its decay a shorter horizon trains exactly as the longest one: a branch is bit-identical to a run trained alone.
"""

import math
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import attrs

from common.errors import BadInput, InvalidValue, refusing
from common.files import replace_file, writing
from experiments.ladder.forecast import target_tokens
from experiments.ladder.ladder_file import LadderFile, rounded_rate, scaled_batch, scaled_rate, size_name, stated
from experiments.ladder.loss_law import LossPoint, NoForecast
from experiments.shared.experiment_files import BUCKET, Sections, check_unchanged, write_run_directory
from experiments.shared.run_pool import RunPool
from experiments.shared.run_progress import describe_cost, measured_speed, read_progress
from model.config import ModelConfig
from model.counts import flops_per_token, matmul_parameter_count
from training.checkpoints.atomic_commit import copy_to_partial, publish
from training.checkpoints.directory import checkpoints_of, name_of
from training.config.batch_plan import Plan, make_plan
from training.config.train_config import TrainConfig, contradictions
from training.data.locate_tokens import lengths_at_hand
from training.telemetry.metrics_log import METRICS

SCHEDULE = "warmup_stable_decay"
MOST_EXTENSIONS = 3  # of a sweep of rates whose best one lies at its edge


@attrs.frozen(kw_only=True)
class Horizon:
    """A run of a trunk: to so many tokens."""

    directory: Path
    sections: Sections
    plan: Plan

    @property
    def decay_begins(self) -> int:
        """Step where a trunk pauses for it."""
        return self.plan.steps - self.plan.schedule.decay_steps


@attrs.frozen(kw_only=True)
class Trunk:
    """A size with one rate and seed, and its horizons."""

    size: ModelConfig
    seed: int
    rate: float
    batch: dict[str, int]  # keys of train.json
    horizons: tuple[Horizon, ...]  # rising; the last one is the trunk's own run

    @property
    def directory(self) -> Path:
        return self.horizons[-1].directory

    def flops(self, *, branches: bool) -> float:
        """Return the FLOPs of training it."""
        steps = self.horizons[-1].plan.steps
        if branches:
            steps += sum(horizon.plan.schedule.decay_steps for horizon in self.horizons[:-1])
        return float(flops_per_token(self.size) * steps * self.horizons[-1].plan.tokens_per_step)


def trunks_of(ladder: LadderFile, size: ModelConfig, rate: float) -> list[Trunk]:
    """Return a size's trunks, one for each seed; write nothing. Raises BadInput for runs that cannot be trained."""
    return [_trunk(ladder, size, rate, seed) for seed in ladder.seeds]


def _trunk(ladder: LadderFile, size: ModelConfig, rate: float, seed: int) -> Trunk:
    parameters, target = matmul_parameter_count(size), matmul_parameter_count(ladder.target.model)
    ranks = max(1, ladder.ranks // ladder.train.get("tensor_parallel", 1))  # data-parallel ones
    batch = scaled_batch(ladder.batch, parameters, target, ladder.microbatch_size, ranks)
    recipe = _recipe(ladder, rate, batch) | ({} if seed == ladder.target.train.random_seed else {"random_seed": seed})
    horizons: list[Horizon] = []
    name = f"{size_name(size)}-rate-{rate:g}" + (f"-seed-{seed}" if len(ladder.seeds) > 1 else "")
    for ratio in ladder.tokens_per_parameter:
        longest = ratio == ladder.tokens_per_parameter[-1]
        keys = {**recipe, "min_train_tokens": round(ratio * parameters)}
        plan = _plan(ladder, size, keys)
        if horizons:  # as many steps of warm-up as the shortest one, of which it is the target's share
            wanted = horizons[0].plan.schedule.warmup_steps
            # half a step more than the percentage of so many, which is rounded down
            keys["warmup_period_percent"] = round(100 * (wanted + 0.5) / plan.steps, 6) if wanted else 0
            plan = _plan(ladder, size, keys)
            assert plan.schedule.warmup_steps == wanted
        directory = ladder.output / (name if longest else f"{name}-{ratio:g}-tokens-per-parameter")
        sections: Sections = {"model": stated("model", attrs.asdict(size)), "train": keys}
        check_unchanged(directory, sections, dict.fromkeys(batch, f"--ranks {ladder.ranks}"))
        horizons.append(Horizon(directory=directory, sections=sections, plan=plan))
    begins = [horizon.decay_begins for horizon in horizons]
    if len({0, *begins}) <= len(begins):
        name = size_name(size)
        raise BadInput(f"{ladder.file}: tokens_per_parameter: too short or too close for {name}: raise or spread")
    return Trunk(size=size, seed=seed, rate=rate, batch=batch, horizons=tuple(horizons))


def write_branch(trunk: Trunk, horizon: Horizon) -> None:
    """Begin a branch with the trunk's checkpoint, as hard links, once. Raises BadInput where the trunk lacks it."""
    step = horizon.decay_begins
    if read_progress(horizon.directory).reached(step, horizon.plan.steps, validates=False):
        return
    source, branch = (checkpoints_of(each.directory) / name_of(step) for each in (trunk, horizon))
    if not source.is_dir():
        raise BadInput(
            f"{source}: no such checkpoint, and {horizon.directory} has not begun; move {trunk.directory} away"
        )
    write_run_directory(horizon.directory, horizon.sections)
    with writing(horizon.directory):
        replace_file(horizon.directory / METRICS, (trunk.directory / METRICS).read_bytes(), durable=True)
        copy_to_partial(source, branch, _link)
        publish(branch)


def tune_rate(pool: RunPool, ladder: LadderFile) -> dict[float, float]:
    """Return the smallest size's loss at its longest horizon by rate, a mean over the seeds.

    Rates beyond an edge are added as needed. Raises NoForecast where the best one still lies at an edge, before the
    larger sizes are paid for.
    """

    def measure(rates: list[float]) -> list[float]:
        tried = [trunks_of(ladder, ladder.sizes[0], rounded_rate(rate)) for rate in rates]
        train_trunks(pool, [trunk for trunks in tried for trunk in trunks], branches=False)
        return [statistics.fmean(final_loss(trunk.horizons[-1]) for trunk in trunks) for trunks in tried]

    losses = dict(zip(ladder.rates, measure(list(ladder.rates)), strict=True))
    factor = (ladder.rates[-1] / ladder.rates[0]) ** (1 / (len(ladder.rates) - 1))
    for _ in range(MOST_EXTENSIONS):
        if (edge := edge_of(losses)) is not None:
            rate = best_rate(losses) * (factor if edge == "highest" else 1 / factor)
            losses[rate] = measure([rate])[0]
    losses = {rounded_rate(rate): losses[rate] for rate in sorted(losses)}
    if not any(map(math.isfinite, losses.values())):
        tried = ", ".join(f"{rate:g}" for rate in losses)
        raise NoForecast(f"{ladder.file}: rates: no forecast: all rates diverged ({tried}); lower them")
    if (edge := edge_of(losses)) is not None:
        tried = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items())
        raise NoForecast(
            f"{ladder.file}: rates: no forecast: the best one of {size_name(ladder.sizes[0])}, {best_rate(losses):g}, "
            f"is the {edge}, so a better one may lie beyond ({tried}); widen the sweep"
        )
    return losses


def best_rate(losses: dict[float, float]) -> float:
    """Return the learning rate of least loss."""
    return min(losses, key=losses.__getitem__)


def edge_of(losses: dict[float, float]) -> str | None:
    """Return which end of the rates tried the best one is, in words; None inside."""
    best = best_rate(losses)
    return {max(losses): "highest", min(losses): "lowest"}.get(best)


def train_trunks(pool: RunPool, trunks: Sequence[Trunk], *, branches: bool) -> None:
    """Train trunks, in any case with the checkpoints of their branches; large ones begin first."""
    trunks = sorted(trunks, key=lambda trunk: -matmul_parameter_count(trunk.size))
    for trunk in trunks:
        write_run_directory(trunk.directory, trunk.horizons[-1].sections)
    waiting: list[Path] = []  # branches that have their checkpoint
    for stage in range(len(trunks[0].horizons)):
        last = stage == len(trunks[0].horizons) - 1  # the trunks' own end: no branch begins there
        ends = {trunk.directory: None if last else trunk.horizons[stage].decay_begins for trunk in trunks}
        pool.train(ends | dict.fromkeys(waiting))
        if last:
            return
        waiting = []
        for trunk in trunks:
            branch, progress = trunk.horizons[stage], read_progress(trunk.directory)
            if progress.diverged is None and (branches or progress.ended is None):
                write_branch(trunk, branch)
            begun = read_progress(branch.directory).reached(1, branch.plan.steps, validates=False)
            if branches and begun:  # of a trunk that diverged later, too
                waiting.append(branch.directory)


def final_loss(horizon: Horizon) -> float:
    """Return the validation loss of a run that has ended; infinite where it diverged. Raises BadInput without one."""
    loss = read_progress(horizon.directory).loss_at(horizon.plan.steps)
    if loss is None:
        raise BadInput(f"{horizon.directory}: no validation loss at its end; move it away")
    return loss


def loss_points(trunks: Sequence[Trunk]) -> list[LossPoint]:
    """Return the points for the loss law. Raises NoForecast for a run that diverged, BadInput without a final loss."""
    points = []
    for trunk in trunks:
        name, parameters = size_name(trunk.size), matmul_parameter_count(trunk.size)
        for horizon in trunk.horizons:
            loss, tokens = final_loss(horizon), horizon.plan.train_tokens
            if math.isinf(loss):
                raise NoForecast(f"no forecast: {horizon.directory} diverged; lower the rates, then rerun")
            points.append(LossPoint(rung=name, parameters=parameters, tokens=tokens, loss=loss, seed=trunk.seed))
    return points


def size_trunks(ladder: LadderFile, best: float) -> list[Trunk]:
    """Return the trunks of all sizes and seeds, given the best rate of the smallest size."""
    smallest = matmul_parameter_count(ladder.sizes[0])
    each = [(size, scaled_rate(best, matmul_parameter_count(size), smallest)) for size in ladder.sizes]
    return [trunk for size, rate in each for trunk in trunks_of(ladder, size, rate)]


def describe_plan(ladder: LadderFile, usd_per_hour: float | None) -> list[str]:
    """Return the plan as lines; `usd_per_hour`: of this machine. Raises BadInput for runs that could not be trained."""
    seeds = len(ladder.seeds)
    tried = [trunks_of(ladder, ladder.sizes[0], rounded_rate(rate))[0] for rate in ladder.rates]
    trunks = size_trunks(ladder, ladder.rates[len(ladder.rates) // 2])[::seeds]
    lines = [_line(trunk, trunk.directory.name, len(trunk.horizons) - 1) for trunk in tried]
    for trunk in trunks:
        lines += [
            _line(trunk, f"{size_name(trunk.size)}, {ratio:g} tokens per parameter", index)
            for index, ratio in enumerate(ladder.tokens_per_parameter)
        ]
    flops = sum(trunk.flops(branches=False) for trunk in tried)
    flops += sum(trunk.flops(branches=True) for trunk in trunks) - trunks[0].flops(branches=False)
    flops *= seeds
    whole = flops_per_token(ladder.target.model) * target_tokens(ladder.target)
    speeds = [
        speed * flops_per_token(trunk.size)
        for trunk in (*tried, *trunks[1:])
        if (speed := measured_speed(trunk.directory)) is not None
    ]
    return [
        *lines,
        f"{len(tried)} rates at {size_name(trunks[0].size)}, more while the best one lies at the edge; then "
        f"{len(trunks)} sizes x {len(ladder.tokens_per_parameter)} horizons, each size one trunk"
        + (f"; all of it with {seeds} seeds" if seeds > 1 else "")
        + f": {flops:.3g} FLOPs, {flops / whole:.2g} x the target's {whole:.3g}",
        describe_cost(flops, "FLOP/s", speeds, usd_per_hour),
    ]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)  # a published checkpoint never changes
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _recipe(ladder: LadderFile, rate: float, batch: dict[str, int]) -> dict[str, object]:
    """Return the target's train.json with the ladder's schedule, batch and rates; those of groups keep their ratio."""
    optimization = ladder.target.train.optimization
    keys = {key: value for key, value in ladder.train.items() if key not in ("gradient_accumulation_steps", BUCKET)}
    for group, other in optimization.group_learning_rates.items():
        keys[f"{group}_learning_rate"] = float(f"{other * rate / optimization.learning_rate:.4g}")
    if optimization.decay != SCHEDULE:
        keys.pop("final_learning_rate_percent", None)
    return keys | batch | {"learning_rate": rate, "schedule_learning_rate": SCHEDULE}


def _plan(ladder: LadderFile, size: ModelConfig, keys: dict[str, object]) -> Plan:
    with refusing(f"{ladder.file}: {size_name(size)}", kinds=(BadInput, ValueError)):
        train = TrainConfig.from_keys(keys, ladder.target.train.file)
        for problem in contradictions(size.context_length, size.tie_weights, train):
            raise InvalidValue(problem)  # train.py would refuse it, with the trunk paid for
        return make_plan(train, size.context_length, ladder.ranks, lengths_at_hand(train))


def _line(trunk: Trunk, name: str, index: int) -> str:
    plan = trunk.horizons[index].plan
    return (
        f"{name}: N {matmul_parameter_count(trunk.size):,}, {plan.steps:,} steps of "
        f"{plan.layout.global_batch_size} sequences, {plan.train_tokens:,} tokens"
    )
