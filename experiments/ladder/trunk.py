"""The trunks of a ladder. A trunk is a warmup_stable_decay run of one size; its branches decay earlier.

The trunk is the longest horizon, and each shorter horizon is a branch. Until its decay, a shorter horizon trains
exactly like the trunk, so a branch is bit-identical to a complete run of this horizon.
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
MOST_EXTENSIONS = 3  # at most this many learning rates are added if the best rate is at the edge


@attrs.frozen(kw_only=True)
class Horizon:
    """The training of a trunk, or of one of its branches, up to a given number of tokens."""

    directory: Path
    sections: Sections
    plan: Plan

    @property
    def decay_begins(self) -> int:
        """The step at which the decay begins, and at which the trunk pauses for this branch."""
        return self.plan.steps - self.plan.schedule.decay_steps


@attrs.frozen(kw_only=True)
class Trunk:
    """The horizons of one size with one learning rate and one seed."""

    size: ModelConfig
    seed: int
    rate: float
    batch: dict[str, int]  # keys of train.json
    horizons: tuple[Horizon, ...]  # ascending; the last horizon is the trunk itself

    @property
    def directory(self) -> Path:
        return self.horizons[-1].directory

    def flops(self, *, branches: bool) -> float:
        """Return the FLOPs of training the trunk, with or without its branches."""
        steps = self.horizons[-1].plan.steps
        if branches:
            steps += sum(horizon.plan.schedule.decay_steps for horizon in self.horizons[:-1])
        return float(flops_per_token(self.size) * steps * self.horizons[-1].plan.tokens_per_step)


def trunks_of(ladder: LadderFile, size: ModelConfig, rate: float) -> list[Trunk]:
    """Return a size's trunks, one for each seed, without writing any files.

    Raise BadInput if a run cannot be trained.
    """
    return [_trunk(ladder, size, rate, seed) for seed in ladder.seeds]


def _trunk(ladder: LadderFile, size: ModelConfig, rate: float, seed: int) -> Trunk:
    parameters, target = matmul_parameter_count(size), matmul_parameter_count(ladder.target.model)
    ranks = max(1, ladder.ranks // ladder.train.get("tensor_parallel", 1))  # data-parallel ranks
    batch = scaled_batch(ladder.batch, parameters, target, ladder.microbatch_size, ranks)
    recipe = _recipe(ladder, rate, batch) | ({} if seed == ladder.target.train.random_seed else {"random_seed": seed})
    horizons: list[Horizon] = []
    name = f"{size_name(size)}-rate-{rate:g}" + (f"-seed-{seed}" if len(ladder.seeds) > 1 else "")
    for ratio in ladder.tokens_per_parameter:
        longest = ratio == ladder.tokens_per_parameter[-1]
        keys = {**recipe, "min_train_tokens": round(ratio * parameters)}
        plan = _plan(ladder, size, keys)
        # All horizons have the same number of warm-up steps: the target's warm-up percentage, applied to the shortest
        # horizon.
        if horizons:
            warmup_steps = horizons[0].plan.schedule.warmup_steps
            # The plan rounds a percentage down to whole steps, so half a step is added.
            keys["warmup_period_percent"] = round(100 * (warmup_steps + 0.5) / plan.steps, 6) if warmup_steps else 0
            plan = _plan(ladder, size, keys)
            assert plan.schedule.warmup_steps == warmup_steps
        directory = ladder.output / (name if longest else f"{name}-{ratio:g}-tokens-per-parameter")
        sections: Sections = {"model": stated("model", attrs.asdict(size)), "train": keys}
        check_unchanged(directory, sections, dict.fromkeys(batch, f"--ranks {ladder.ranks}"))
        horizons.append(Horizon(directory=directory, sections=sections, plan=plan))
    begins = [horizon.decay_begins for horizon in horizons]
    if len({0, *begins}) <= len(begins):
        name = size_name(size)
        raise BadInput(
            f"{ladder.file}: tokens_per_parameter: the horizons of {name} are too short or too close to each other; "
            "choose longer horizons, or horizons that are farther apart"
        )
    return Trunk(size=size, seed=seed, rate=rate, batch=batch, horizons=tuple(horizons))


def write_branch(trunk: Trunk, horizon: Horizon) -> None:
    """Start a branch with hard links to a checkpoint of the trunk, unless the branch has already started.

    Raise BadInput if the trunk does not have the checkpoint.
    """
    step = horizon.decay_begins
    if read_progress(horizon.directory).reached(step, horizon.plan.steps, validates=False):
        return
    source, branch = (checkpoints_of(run.directory) / name_of(step) for run in (trunk, horizon))
    if not source.is_dir():
        raise BadInput(
            f"{source}: no such checkpoint, but {horizon.directory} must start with it; move {trunk.directory} away "
            "to train the trunk again"
        )
    write_run_directory(horizon.directory, horizon.sections)
    with writing(horizon.directory):
        replace_file(horizon.directory / METRICS, (trunk.directory / METRICS).read_bytes(), durable=True)
        copy_to_partial(source, branch, _link)
        publish(branch)


def tune_rate(pool: RunPool, ladder: LadderFile) -> dict[float, float]:
    """Return the smallest size's loss for each learning rate: the mean over the seeds at the longest horizon.

    If the best rate is at an edge, more rates are tried beyond it. If the best rate is still at an edge after that,
    raise NoForecast before the larger sizes cost money.
    """

    def measure(rates: list[float]) -> list[float]:
        trunks_by_rate = [trunks_of(ladder, ladder.sizes[0], rounded_rate(rate)) for rate in rates]
        train_trunks(pool, [trunk for trunks in trunks_by_rate for trunk in trunks], branches=False)
        return [statistics.fmean(final_loss(trunk.horizons[-1]) for trunk in trunks) for trunks in trunks_by_rate]

    losses = dict(zip(ladder.rates, measure(list(ladder.rates)), strict=True))
    factor = (ladder.rates[-1] / ladder.rates[0]) ** (1 / (len(ladder.rates) - 1))
    for _ in range(MOST_EXTENSIONS):
        if (edge := edge_of(losses)) is not None:
            rate = best_rate(losses) * (factor if edge == "highest" else 1 / factor)
            losses[rate] = measure([rate])[0]
    losses = {rounded_rate(rate): losses[rate] for rate in sorted(losses)}
    if not any(map(math.isfinite, losses.values())):
        rates = ", ".join(f"{rate:g}" for rate in losses)
        raise NoForecast(
            f"{ladder.file}: rates: no forecast: the runs diverged at all rates ({rates}); use lower rates"
        )
    if (edge := edge_of(losses)) is not None:
        rates = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items())
        raise NoForecast(
            f"{ladder.file}: rates: no forecast: the best rate for {size_name(ladder.sizes[0])}, "
            f"{best_rate(losses):g}, is the {edge} rate, so a better rate may exist beyond it (losses: {rates}); add "
            f"rates at the {edge.removesuffix('est')} end"
        )
    return losses


def best_rate(losses: dict[float, float]) -> float:
    """Return the learning rate with the lowest loss."""
    return min(losses, key=losses.__getitem__)


def edge_of(losses: dict[float, float]) -> str | None:
    """Return "highest" or "lowest" if the best learning rate is the highest or lowest of all rates; otherwise None."""
    best = best_rate(losses)
    return {max(losses): "highest", min(losses): "lowest"}.get(best)


def train_trunks(pool: RunPool, trunks: Sequence[Trunk], *, branches: bool) -> None:
    """Train trunks and, if `branches` is true, their branches. Large trunks start first.

    The checkpoints from which branches start are always written, so that branches can be trained later.
    """
    trunks = sorted(trunks, key=lambda trunk: -matmul_parameter_count(trunk.size))
    for trunk in trunks:
        write_run_directory(trunk.directory, trunk.horizons[-1].sections)
    waiting: list[Path] = []  # branches whose starting checkpoint exists, so they can be trained
    for stage in range(len(trunks[0].horizons)):
        last = stage == len(trunks[0].horizons) - 1  # the trunks end here, so no branch starts
        ends = {trunk.directory: None if last else trunk.horizons[stage].decay_begins for trunk in trunks}
        pool.train(ends | dict.fromkeys(waiting))
        if last:
            return
        waiting = []
        for trunk in trunks:
            branch, progress = trunk.horizons[stage], read_progress(trunk.directory)
            if progress.diverged is None and (branches or progress.ended is None):
                write_branch(trunk, branch)
            has_begun = read_progress(branch.directory).reached(1, branch.plan.steps, validates=False)
            if branches and has_begun:  # a branch is trained even if the trunk diverged later
                waiting.append(branch.directory)


def final_loss(horizon: Horizon) -> float:
    """Return the validation loss at the end of a run; it is infinite if the run diverged.

    Raise BadInput if the loss was not recorded.
    """
    loss = read_progress(horizon.directory).loss_at(horizon.plan.steps)
    if loss is None:
        raise BadInput(f"{horizon.directory}: has no validation loss at its last step; move it away to train it again")
    return loss


def loss_points(trunks: Sequence[Trunk]) -> list[LossPoint]:
    """Return the points for the loss law.

    Raise NoForecast if a run diverged, and BadInput if a run has no final loss.
    """
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
    """Return the trunks of all sizes and seeds, given the best learning rate of the smallest size."""
    smallest = matmul_parameter_count(ladder.sizes[0])
    rates = [(size, scaled_rate(best, matmul_parameter_count(size), smallest)) for size in ladder.sizes]
    return [trunk for size, rate in rates for trunk in trunks_of(ladder, size, rate)]


def describe_plan(ladder: LadderFile, usd_per_hour: float | None) -> list[str]:
    """Return the plan of a ladder as lines. `usd_per_hour` is the price of this machine.

    Raise BadInput if a run cannot be trained.
    """
    seeds = len(ladder.seeds)
    tuning_trunks = [trunks_of(ladder, ladder.sizes[0], rounded_rate(rate))[0] for rate in ladder.rates]
    trunks = size_trunks(ladder, ladder.rates[len(ladder.rates) // 2])[::seeds]
    lines = [_line(trunk, trunk.directory.name, len(trunk.horizons) - 1) for trunk in tuning_trunks]
    for trunk in trunks:
        lines += [
            _line(trunk, f"{size_name(trunk.size)}, {ratio:g} tokens per parameter", index)
            for index, ratio in enumerate(ladder.tokens_per_parameter)
        ]
    flops = sum(trunk.flops(branches=False) for trunk in tuning_trunks)
    flops += sum(trunk.flops(branches=True) for trunk in trunks) - trunks[0].flops(branches=False)
    flops *= seeds
    target_flops = flops_per_token(ladder.target.model) * target_tokens(ladder.target)
    speeds = [
        speed * flops_per_token(trunk.size)
        for trunk in (*tuning_trunks, *trunks[1:])
        if (speed := measured_speed(trunk.directory)) is not None
    ]
    return [
        *lines,
        f"{len(tuning_trunks)} rates at {size_name(trunks[0].size)}, and more if the best rate is at the edge; then "
        f"{len(trunks)} sizes x {len(ladder.tokens_per_parameter)} horizons, with one trunk for each size"
        + (f"; each run with {seeds} seeds" if seeds > 1 else "")
        + f": {flops:.3g} FLOPs, {flops / target_flops:.2g} x the target's {target_flops:.3g}",
        describe_cost(flops, "FLOP/s", speeds, usd_per_hour),
    ]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)  # safe, because a published checkpoint never changes
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target)


def _recipe(ladder: LadderFile, rate: float, batch: dict[str, int]) -> dict[str, object]:
    """Return the target's train.json with the ladder's schedule, batch and learning rate.

    The learning rate of each parameter group keeps its ratio to the main learning rate.
    """
    optimization = ladder.target.train.optimization
    keys = {key: value for key, value in ladder.train.items() if key not in ("gradient_accumulation_steps", BUCKET)}
    for group, group_rate in optimization.group_learning_rates.items():
        keys[f"{group}_learning_rate"] = float(f"{group_rate * rate / optimization.learning_rate:.4g}")
    if optimization.decay != SCHEDULE:
        keys.pop("final_learning_rate_percent", None)
    return keys | batch | {"learning_rate": rate, "schedule_learning_rate": SCHEDULE}


def _plan(ladder: LadderFile, size: ModelConfig, keys: dict[str, object]) -> Plan:
    with refusing(f"{ladder.file}: {size_name(size)}", kinds=(BadInput, ValueError)):
        train = TrainConfig.from_keys(keys, ladder.target.train.file)
        for problem in contradictions(size.context_length, size.tie_weights, train):
            raise InvalidValue(problem)  # train.py would report this only after the trunk has cost money
        return make_plan(train, size.context_length, ladder.ranks, lengths_at_hand(train))


def _line(trunk: Trunk, name: str, index: int) -> str:
    plan = trunk.horizons[index].plan
    return (
        f"{name}: N {matmul_parameter_count(trunk.size):,}, {plan.steps:,} steps of "
        f"{plan.layout.global_batch_size} sequences, {plan.train_tokens:,} tokens"
    )
