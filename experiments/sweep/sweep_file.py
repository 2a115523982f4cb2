"""Sweep file: a base run directory, levers, seeds, and a rule that stops losers."""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from common.checks import unknown_key
from common.errors import BadInput
from common.text import quoted
from evaluation.shared.significance import default_seeds
from experiments.shared.experiment_files import BUCKET, FIXED, Changes, changed_run, read_experiment, read_seeds
from experiments.sweep.measured_loss import SharedMeasure, read_measure
from training.config.train_config import KEYS, Run, resolve_key

BASE = "base"
MOST_VARIANTS = 1000
NO_LEVER = (
    "no lever, for it changes the tokens that the final loss is measured on; it may stand in 'set', for all runs, or "
    "in a file with 'measure'"
)
REFUSED = {
    f"train.{BUCKET}": "all runs would share it; their checkpoints stay on the disk",
    "train.random_seed": "the seeds of a sweep are its key 'seeds'",
}


@attrs.frozen(kw_only=True)
class Variant:
    """The base, or a change of it."""

    name: str
    changes: Changes
    run: Run  # with the changes, and with those of all runs


def read_variants(
    file: Path, levers: Any, base: Run, shared: Changes, fixed: Collection[str] = FIXED
) -> tuple[Variant, ...]:
    """Return the base, then each lever's other values; `shared`: changes of all runs. Raises BadInput for a lever.

    `fixed`: keys that are no lever.
    """
    if not isinstance(levers, dict) or not levers:
        raise BadInput(f'{file}: levers: got {quoted(levers)}, wanted {{"train.KEY": [VALUE, ...]}}')
    variants = {BASE: Variant(name=BASE, changes={}, run=base)}
    for lever, values in levers.items():
        for name, changes in _choices(file, lever, values, fixed):
            run = changed_run(str(file), base.directory, shared | changes)
            if _keys(run) == _keys(base):
                continue
            if name in variants:
                raise BadInput(f"{file}: levers: two variants are called {quoted(name)}; give one a name of its own")
            variants[name] = Variant(name=name, changes=changes, run=run)
    if not 1 < len(variants) <= MOST_VARIANTS:
        raise BadInput(f"{file}: levers: got {len(variants) - 1:,} variants that differ from the base, wanted 1 to 999")
    return tuple(variants.values())


def read_changes(file: Path, where: str, values: Any, fixed: Collection[str] | None = None) -> Changes:
    """Return "SECTION.KEY" and values of a lever, None: of `set`, spelled as for --set. Raises BadInput."""
    if not isinstance(values, dict) or (fixed is not None and not values):
        raise BadInput(f'{file}: {where}: got {quoted(values)}, wanted {{"train.KEY": VALUE}}')
    known = [f"{section}.{key}" for section, keys in KEYS.items() for key in keys]
    changes = {".".join(resolve_key(name)): value for name, value in values.items()}
    for key in changes:
        if key not in known:
            raise BadInput(unknown_key(key, known, f"{file}: {where}"))
        reason = REFUSED.get(key) or (NO_LEVER if key in (fixed or ()) else None)
        if reason is not None:
            raise BadInput(f"{file}: {where}: {key}: {reason}")
    return changes


def _choices(file: Path, name: str, lever: Any, fixed: Collection[str]) -> Iterator[tuple[str, Changes]]:
    """Yield name and changes of each value of a lever: of one key, or the keys of a named one."""
    if isinstance(lever, dict):
        if not re.fullmatch(r"[\w.+-]{1,80}", name) or name.startswith("."):
            raise BadInput(f"{file}: levers: {quoted(name)}: wanted a name of letters, digits and _ . + -")
        yield name, read_changes(file, f"levers: {name}", lever, fixed)
        return
    if not isinstance(lever, list) or not lever:
        raise BadInput(f"{file}: levers: {name}: got {quoted(lever)}, wanted a list of values, or an object of keys")
    for value in lever:
        changes = read_changes(file, "levers", {name: value}, fixed)
        if isinstance(value, list | dict):
            raise BadInput(f'{file}: levers: {name}: a list needs a name: {{"NAME": {{"{name}": ...}}}}')
        text = re.sub(r"[^\w.+-]", "_", value if isinstance(value, str) else json.dumps(value))
        yield f"{resolve_key(name)[1]}={text[:80]}", changes


def _keys(run: Run) -> str:
    """Return all keys of a run, defaults included, as text: true is not 1 there."""
    return json.dumps([attrs.asdict(run.model), run.train.flat()])


KNOWN = ("base", "levers", "measure", "seeds", "set", "halving")
REMOVED = {
    "mixture": "the mixing law was removed: a seed's noise is shared by all measured domains, so its intervals did not "
    "hold, and it named a best mixture in 20 to 44 % of cases in which there was nothing to gain; instead, compare the "
    "weights that interest you as levers, with 'measure': "
    '"levers": {"NAME": {"train.dataset": [{"dataset": DIR, "weight": 2}, {"dataset": DIR, "weight": 1}]}}'
}


@attrs.frozen(kw_only=True)
class Halving:
    """Successive halving (Jamieson and Talwalkar 2016, AISTATS) by mean validation loss; the base always goes on."""

    factor: float
    rungs: tuple[float, ...]  # shares of a run's steps, rising; none: no rule

    def losers(self, means: Mapping[str, float]) -> list[str]:
        """Return the variants that do not go on, by their mean losses; of equal ones the first of the file do."""
        ranked = sorted(means, key=means.__getitem__)
        return ranked[max(1, math.ceil(len(ranked) / self.factor)) :]


@attrs.frozen(kw_only=True)
class Sweep:
    """A sweep file, checked. The first variant is the base."""

    file: Path
    base: Path
    changes: Changes  # of all runs: "set"
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    halving: Halving
    measure: SharedMeasure | None  # of the final loss; None: the runs' own validation


def read_sweep(file: Path) -> Sweep:
    """Read a sweep file. Raises BadInput, naming file and key."""
    advice = 'wanted {"base": RUN, "levers": {"train.KEY": [VALUE, ...]}, "seeds": N}'
    values = read_experiment(file, KNOWN, advice, removed=REMOVED)
    base = values.get("base")
    if not isinstance(base, str):
        raise BadInput(f"{file}: base: got {quoted(base)}, wanted a run directory, such as runs/quickstart")
    if values.get("halving") is not None and values.get("measure") is not None:
        raise BadInput(f"{file}: halving: rungs are compared by the runs' own validation, not by 'measure'; remove one")
    changes = read_changes(file, "set", values.get("set", {}))
    run = changed_run(str(file), Path(base), changes)
    if run.train.validation.validation_interval is None:
        raise BadInput(f"{file}: {base} never validates; set train.validation_interval: the verdict needs the loss")
    fixed = FIXED if values.get("measure") is None else ("train.validation_interval",)
    variants = read_variants(file, values.get("levers"), run, changes, fixed)
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
        measure=read_measure(file, values.get("measure"), [variant.run.train for variant in variants]),
    )


def run_name(variant: str, seed: int | str) -> str:
    """Return the name of the directory of a variant's run."""
    return f"{variant}-seed-{seed}"


def _halving(file: Path, rule: Any) -> Halving:
    if rule is None:
        return Halving(factor=1, rungs=())
    fine = isinstance(rule, dict) and set(rule) == {"factor", "rungs"} and isinstance(rule["rungs"], list)
    fine = fine and all(type(value) in (int, float) for value in [rule["factor"], *rule["rungs"]])
    fine = fine and 1 < rule["factor"] < MOST_VARIANTS and bool(rule["rungs"])
    if not fine or not all(low < high for low, high in pairwise([0, *rule["rungs"], 1])):
        wanted = '{"factor": 3, "rungs": [0.25, 0.5]}: a number above 1, and rising shares of the steps below 1'
        raise BadInput(f"{file}: halving: got {quoted(rule)}, wanted {wanted}")
    return Halving(factor=rule["factor"], rungs=tuple(rule["rungs"]))
