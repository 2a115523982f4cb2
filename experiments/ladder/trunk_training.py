"""Training of a ladder: its plan and cost, the tuning of the rate, and its trunks and branches by stages.

All trunks train to a pause, then on, beside the branches that begin there.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from common.errors import BadInput
from experiments.ladder.forecast import target_tokens
from experiments.ladder.ladder_file import LadderFile, rounded_rate, scaled_rate, size_name
from experiments.ladder.loss_law import LossPoint, NoForecast
from experiments.ladder.trunk import Horizon, Trunk, trunks_of, write_branch
from experiments.shared.experiment_files import write_run_directory
from experiments.shared.run_pool import RunPool
from experiments.shared.run_progress import describe_cost, measured_speed, read_progress
from model.counts import flops_per_token, matmul_parameter_count

MOST_EXTENSIONS = 3  # of a sweep of rates whose best one lies at its edge


def train_ladder(pool: RunPool, ladder: LadderFile) -> tuple[dict[float, float], list[Trunk]]:
    """Train all trunks and branches; return the losses by rate, and the trunks of the sizes.

    Raises as RunPool.train, and NoForecast.
    """
    rates = tune_rate(pool, ladder)
    trunks = size_trunks(ladder, best_rate(rates))
    train_trunks(pool, trunks, branches=True)
    return rates, trunks


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
    """Return the validation loss of a run that has ended; infinite where it diverged."""
    progress = read_progress(horizon.directory)
    loss = progress.losses.get(horizon.plan.steps, math.inf) if progress.diverged is None else math.inf
    return loss if math.isfinite(loss) else math.inf


def loss_points(trunks: Sequence[Trunk]) -> list[LossPoint]:
    """Return the points for the loss law. Raises NoForecast for a run that diverged, BadInput without a final loss."""
    points = []
    for trunk in trunks:
        for horizon in trunk.horizons:
            loss = final_loss(horizon)
            if not math.isfinite(loss):
                if read_progress(horizon.directory).diverged is None:
                    raise BadInput(f"{horizon.directory}: no validation loss at its end; move it away")
                raise NoForecast(f"no forecast: {horizon.directory} diverged; lower the rates, then rerun")
            points.append(
                LossPoint(
                    rung=size_name(trunk.size),
                    parameters=matmul_parameter_count(trunk.size),
                    tokens=horizon.plan.train_tokens,
                    loss=loss,
                    seed=trunk.seed,
                )
            )
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
        for trunk in {trunk.directory: trunk for trunk in [*tried, *trunks]}.values()
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


def _line(trunk: Trunk, name: str, index: int) -> str:
    plan = trunk.horizons[index].plan
    return (
        f"{name}: N {matmul_parameter_count(trunk.size):,}, {plan.steps:,} steps of "
        f"{plan.layout.global_batch_size} sequences, {plan.train_tokens:,} tokens"
    )
