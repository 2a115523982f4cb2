"""Sweep file: a base run directory, levers, seeds, and a rule that stops losers."""

from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, quoted
from evaluation.shared.significance import default_seeds
from experiments.shared.experiment_files import read_experiment, read_seeds
from experiments.shared.run_directories import Changes, changed_run
from experiments.sweep.levers import MOST_VARIANTS, Variant, read_changes, read_variants

KNOWN = ("base", "levers", "seeds", "set", "combine", "halving")


@attrs.frozen(kw_only=True)
class Halving:
    """Successive halving (Jamieson and Talwalkar 2016, AISTATS): at each rung the best 1/factor of the variants go on.

    They are ranked by their mean validation loss over the seeds at that step. The base always goes on.
    """

    factor: float
    rungs: tuple[float, ...]  # shares of a run's steps, rising


@attrs.frozen(kw_only=True)
class Sweep:
    """A sweep file, checked. The first variant is the base."""

    file: Path
    base: Path
    changes: Changes  # of all runs: "set"
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    halving: Halving | None


def read_sweep(file: Path) -> Sweep:
    """Read a sweep file. Raises BadInput, naming file and key."""
    values = read_experiment(file, KNOWN, 'wanted {"base": RUN, "levers": {"train.KEY": [VALUE, ...]}, "seeds": N}')
    base = values.get("base")
    if not isinstance(base, str):
        raise BadInput(f"{file}: base: got {quoted(base)}, wanted a run directory, such as runs/quickstart")
    changes = read_changes(file, "set", values.get("set", {}))
    run = changed_run(str(file), Path(base), changes)
    if run.train.validation.validation_interval is None:
        raise BadInput(f"{file}: {base} never validates; set train.validation_interval: the verdict needs the loss")
    variants = read_variants(file, values, run, changes)
    seeds = values.get("seeds")
    if seeds is None:
        seeds = default_seeds(len(variants) - 1)
    return Sweep(
        file=file,
        base=Path(base),
        changes=changes,
        variants=variants,
        seeds=read_seeds(file, seeds, run.train.random_seed),
        halving=_halving(file, values.get("halving")),
    )


def run_name(variant: str, seed: int | str) -> str:
    """Return the name of the directory of a variant's run."""
    return f"{variant}-seed-{seed}"


def _halving(file: Path, rule: Any) -> Halving | None:
    if rule is None:
        return None
    wanted = 'wanted {"factor": 3, "rungs": [0.25, 0.5]}: a number above 1, and rising shares of the steps below 1'
    if not isinstance(rule, dict) or set(rule) != {"factor", "rungs"} or not isinstance(rule["rungs"], list):
        raise BadInput(f"{file}: halving: got {quoted(rule)}, {wanted}")
    factor, rungs = rule["factor"], rule["rungs"]
    if not all(type(value) in (int, float) for value in [factor, *rungs]):
        raise BadInput(f"{file}: halving: got {quoted(rule)}, {wanted}")
    rising = all(low < high for low, high in zip([0, *rungs], [*rungs, 1], strict=True))
    if not 1 < factor < MOST_VARIANTS or not rungs or not rising:
        raise BadInput(f"{file}: halving: got {quoted(rule)}, {wanted}")
    return Halving(factor=factor, rungs=tuple(rungs))
