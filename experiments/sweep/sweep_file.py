"""Sweep file: a base run directory, levers and seeds. It becomes variants, each a change of the base."""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, nearest, quoted
from experiments.shared.experiment_files import read_experiment, read_seeds
from experiments.shared.run_directories import BUCKET
from experiments.sweep.dunnett import default_seeds
from training.config.train_config import KEYS, Run, load_run

BASE = "base"
KNOWN = ("base", "levers", "seeds", "set", "combine", "halving")
MOST_VARIANTS = 1000
LONGEST_NAME = 200  # of a variant; its runs are directories, with the seed behind it
# What decides on which tokens, in which windows, the final loss is measured
FIXED = (
    "train.validation_sequences",
    "train.start_val_token",
    "train.validation_interval",
    "model.vocab_size",
    "model.context_length",
    "train.dataset",
)
Changes = dict[str, Any]  # "train.KEY" or "model.KEY": value


@attrs.frozen(kw_only=True)
class Halving:
    """Successive halving (Jamieson and Talwalkar 2016, AISTATS): at each rung the best 1/factor of the variants go on.

    They are ranked by their mean validation loss over the seeds at that step. The base always goes on.
    """

    factor: float
    rungs: tuple[float, ...]  # shares of a run's steps, rising


@attrs.frozen(kw_only=True)
class Variant:
    """The base, or a change of it."""

    name: str
    changes: Changes


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
    changes = _changes(file, "set", values.get("set", {}))
    effective = _flat(changed_run(file, Path(base), changes))
    if effective["train.validation_interval"] is None:
        raise BadInput(f"{file}: {base} never validates; set train.validation_interval: the verdict needs the loss")
    variants = _variants(file, values, effective)
    seeds = values.get("seeds")
    if seeds is None:
        seeds = default_seeds(len(variants) - 1)
    return Sweep(
        file=file,
        base=Path(base),
        changes=changes,
        variants=variants,
        seeds=read_seeds(file, seeds, effective["train.random_seed"]),
        halving=_halving(file, values.get("halving")),
    )


def changed_run(file: Path, base: Path, changes: Changes) -> Run:
    """Return the base with these changes. Raises BadInput, naming the sweep file, for an invalid value."""
    try:
        return load_run(base, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    except BadInput as error:
        raise BadInput(f"{file}: {str(error).removeprefix('--set: ')}") from error


def _flat(run: Run) -> Changes:
    """Return all keys of a run, defaults included."""
    values = {"model": attrs.asdict(run.model), "train": run.train.flat()}
    return {f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()}


def _variants(file: Path, values: Mapping[str, Any], effective: Changes) -> tuple[Variant, ...]:
    """Return the base, then each lever's values alone, or all combinations."""
    levers, combine = values.get("levers"), values.get("combine", False)
    if not isinstance(levers, dict) or not levers:
        raise BadInput(f'{file}: levers: got {quoted(levers)}, wanted {{"train.KEY": [VALUE, ...]}}')
    if not isinstance(combine, bool):
        raise BadInput(f"{file}: combine: got {quoted(combine)}, wanted true or false")
    choices = [
        [choice for choice in _choices(file, name, lever) if _differs(choice.changes, effective)]
        for name, lever in levers.items()
    ]
    base = Variant(name=BASE, changes={})
    if not combine:
        found = [base, *(choice for lever in choices for choice in lever)]
    else:
        found = [_combined(parts) for parts in product(*([None, *lever] for lever in choices))]
    names = [variant.name for variant in found]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"{file}: levers: two variants are called {quoted(name)}; give one a name of its own")
    if long := next((name for name in names if len(name) > LONGEST_NAME), None):
        raise BadInput(f"{file}: levers: {quoted(long)}: got {len(long)} characters, wanted {LONGEST_NAME} at most")
    if not 1 < len(found) <= MOST_VARIANTS:
        raise BadInput(f"{file}: levers: got {len(found) - 1} variants that differ from the base, wanted 1 to 999")
    return tuple(found)


def _combined(parts: tuple[Variant | None, ...]) -> Variant:
    chosen = [part for part in parts if part is not None]
    changes = {key: value for part in chosen for key, value in part.changes.items()}
    return Variant(name=",".join(part.name for part in chosen) or BASE, changes=changes)


def _choices(file: Path, name: str, lever: Any) -> Iterator[Variant]:
    """Yield a variant for each value of a lever: of one key, or the keys of a named one."""
    if isinstance(lever, dict):
        if not re.fullmatch(r"[\w.+-]{1,80}", name) or name.startswith("."):
            raise BadInput(f"{file}: levers: {quoted(name)}: wanted a name of letters, digits and _ . + -")
        yield Variant(name=name, changes=_changes(file, f"levers: {name}", lever, lever=True))
        return
    if not isinstance(lever, list) or not lever:
        raise BadInput(f"{file}: levers: {name}: got {quoted(lever)}, wanted a list of values, or an object of keys")
    for value in lever:
        changes = _changes(file, "levers", {name: value}, lever=True)
        if isinstance(value, list | dict):
            raise BadInput(f'{file}: levers: {name}: a list needs a name: {{"NAME": {{"{name}": ...}}}}')
        text = re.sub(r"[^\w.+-]", "_", value if isinstance(value, str) else json.dumps(value))
        yield Variant(name=f"{name.partition('.')[2]}={text[:80]}", changes=changes)


def _changes(file: Path, where: str, values: Any, *, lever: bool = False) -> Changes:
    if not isinstance(values, dict) or (lever and not values):
        raise BadInput(f'{file}: {where}: got {quoted(values)}, wanted {{"train.KEY": VALUE}}')
    known = [f"{section}.{key}" for section, keys in KEYS.items() for key in keys]
    for key in values:
        if key not in known:
            raise BadInput(f"{file}: {where}: unknown key {quoted(key)}{nearest(key, known)}")
        if key == f"train.{BUCKET}":
            raise BadInput(f"{file}: {where}: {key}: all runs would share it; their checkpoints stay on the disk")
        if key == "train.random_seed":
            raise BadInput(f"{file}: {where}: {key}: the seeds of a sweep are its key 'seeds'")
        if lever and key in FIXED:
            raise BadInput(
                f"{file}: {where}: {key}: no lever, for it changes the tokens that the final loss is measured on; "
                "it may stand in 'set', for all runs"
            )
    return dict(values)


def _differs(changes: Changes, effective: Changes) -> bool:
    return any(json.dumps(effective[key]) != json.dumps(value) for key, value in changes.items())


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
