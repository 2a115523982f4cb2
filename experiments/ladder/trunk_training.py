"""Training of trunks and branches by stages: all trunks to a pause, then on, beside the branches that begin there."""

import math
import statistics
from collections.abc import Sequence

from common.errors import BadInput
from experiments.ladder.loss_law import LossPoint, NoForecast
from experiments.ladder.size_rules import rounded_rate
from experiments.ladder.trunk import Horizon, Trunk, TrunkMaker, write_branch
from experiments.shared.interior_optimum import best_rate, edge_of, find_optimum
from experiments.shared.run_directories import write_run_directory
from experiments.shared.run_pool import RunPool
from experiments.shared.run_progress import read_progress
from experiments.shared.run_target import PlannedRun

MOST_EXTENSIONS = 3  # of a sweep of rates whose best one lies at its edge


def tune_rate(pool: RunPool, maker: TrunkMaker) -> dict[float, float]:
    """Return the smallest size's loss at its longest horizon by rate, a mean over the seeds.

    Rates beyond an edge are added as needed. Raises NoForecast where the best one still lies at an edge, before the
    larger sizes are paid for.
    """
    ladder = maker.ladder

    def measure(rates: list[float]) -> list[float]:
        tried = [maker.seeds(ladder.sizes[0], rounded_rate(rate)) for rate in rates]
        train_trunks(pool, [trunk for trunks in tried for trunk in trunks], branches=False)
        return [statistics.fmean(final_loss(trunk.horizons[-1]) for trunk in trunks) for trunks in tried]

    rates = ladder.rates
    factor = (rates[-1] / rates[0]) ** (1 / (len(rates) - 1))
    losses = find_optimum(measure, rates, [factor], MOST_EXTENSIONS)
    losses = {rounded_rate(rate): losses[rate] for rate in sorted(losses)}
    if not any(map(math.isfinite, losses.values())):
        tried = ", ".join(f"{rate:g}" for rate in losses)
        raise NoForecast(f"{ladder.file}: rates: no forecast: all rates diverged ({tried}); lower them")
    if (edge := edge_of(losses)) is not None:
        tried = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items())
        raise NoForecast(
            f"{ladder.file}: rates: no forecast: the best one of {ladder.sizes[0].name}, {best_rate(losses):g}, is the "
            f"{edge}, so a better one may lie beyond ({tried}); widen the sweep"
        )
    return losses


def train_trunks(pool: RunPool, trunks: Sequence[Trunk], *, branches: bool) -> None:
    """Train trunks, in any case with the checkpoints of their branches; large ones begin first."""
    trunks = sorted(trunks, key=lambda trunk: -trunk.size.parameters)
    for trunk in trunks:
        write_run_directory(trunk.directory, trunk.horizons[-1].sections)
    waiting: list[PlannedRun] = []  # branches that have their checkpoint
    for stage in range(len(trunks[0].horizons)):
        last = stage == len(trunks[0].horizons) - 1  # the trunks' own end: no branch begins there
        pool.train(
            [
                PlannedRun(directory=trunk.directory, until_step=None if last else trunk.horizons[stage].decay_begins)
                for trunk in trunks
            ]
            + waiting
        )
        if last:
            return
        waiting = []
        for trunk in trunks:
            branch, progress = trunk.horizons[stage], read_progress(trunk.directory)
            if progress.diverged is None and (branches or progress.ended is None):
                write_branch(trunk, branch)
            begun = read_progress(branch.directory).reached(1, branch.plan.steps, validates=False)
            if branches and begun:  # of a trunk that diverged later, too
                waiting.append(PlannedRun(directory=branch.directory))


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
                    rung=trunk.size.name,
                    parameters=trunk.size.parameters,
                    tokens=horizon.plan.train_tokens,
                    loss=loss,
                    seed=trunk.seed,
                )
            )
    return points
