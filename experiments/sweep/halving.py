"""Successive halving: which variants the rule of a sweep file stops, and training by it."""

import math
from collections.abc import Sequence
from itertools import pairwise

from common.errors import BadInput
from experiments.shared.run_pool import RunPool
from experiments.shared.run_progress import read_progress
from experiments.sweep.sweep_file import BASE, Halving, Sweep
from experiments.sweep.variant_runs import VariantRun


def train_sweep(pool: RunPool, sweep: Sweep, runs: Sequence[VariantRun]) -> None:
    """Train all runs to their ends, but for those that the rule stops. Raises as RunPool.train."""
    for share in sweep.halving.rungs if sweep.halving else ():
        stopped = stopped_variants(sweep, runs)
        pool.train({run.directory: rung_step(run, share) for run in runs if run.variant.name not in stopped})
    stopped = stopped_variants(sweep, runs)
    pool.train({run.directory: None for run in runs if run.variant.name not in stopped})


def check_rungs(sweep: Sweep, runs: Sequence[VariantRun]) -> None:
    """Raise BadInput for rungs that fall on one step of a run, or on its last one.

    And for a run that is past a rung without its loss there: the rule came when it had been trained.
    """
    shares = sweep.halving.rungs if sweep.halving else ()
    for run in runs:
        steps = [*(rung_step(run, share) for share in shares), run.plan.steps]
        if any(low >= high for low, high in pairwise(steps)):
            rungs = ", ".join(map(str, steps[:-1]))
            raise BadInput(
                f"{sweep.file}: halving: {run.directory.name}: got rungs at steps {rungs} of {run.plan.steps:,}, "
                "wanted rising ones before the last; spread the rungs, or train more steps"
            )
    stopped = stopped_variants(sweep, runs)
    for share in shares:
        for run in runs:
            step = rung_step(run, share)
            progress = read_progress(run.directory)
            passed = run.variant.name not in stopped and max(progress.steps, progress.ended or 0) > step
            if passed and _rung_loss(run, share) is None:
                raise BadInput(
                    f"{sweep.file}: halving: {run.directory.name} is already past the rung at step {step:,}, without a "
                    "validation there; remove the key, or choose another --output"
                )


def rung_step(run: VariantRun, share: float) -> int:
    """Return the step of a rung: where the run pauses and validates."""
    return max(1, round(share * run.plan.steps))


def stopped_variants(sweep: Sweep, runs: Sequence[VariantRun]) -> dict[str, int]:
    """Return the step where the rule has stopped each loser, by variant, as far as the rungs are complete."""
    stopped: dict[str, int] = {}
    for share in sweep.halving.rungs if sweep.halving else ():
        alive = [run for run in runs if run.variant.name not in stopped and run.variant.name != BASE]
        losses: dict[str, list[float]] = {}
        steps: dict[str, int] = {}
        for run in alive:
            loss = _rung_loss(run, share)
            if loss is None:
                return stopped
            losses.setdefault(run.variant.name, []).append(loss)
            steps[run.variant.name] = rung_step(run, share)
        means = {name: math.fsum(values) / len(values) for name, values in losses.items()}
        assert sweep.halving is not None
        stopped |= {name: steps[name] for name in losers(sweep.halving, means)}
    return stopped


def losers(rule: Halving, means: dict[str, float]) -> list[str]:
    """Return the variants that do not go on; of equal means the first ones of the file do."""
    ranked = sorted(means, key=lambda name: means[name])
    return ranked[max(1, math.ceil(len(ranked) / rule.factor)) :]


def _rung_loss(run: VariantRun, share: float) -> float | None:
    """Return the validation loss at a rung, infinite where the run diverged before; None where it is not known."""
    progress = read_progress(run.directory)
    loss = progress.losses.get(rung_step(run, share))
    if loss is None:
        return math.inf if progress.diverged is not None else None
    return loss if math.isfinite(loss) else math.inf
