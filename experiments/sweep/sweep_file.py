"""The sweep file: a base run directory, levers, seeds, and a rule for ending the runs of losing variants early."""

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
    "cannot be a lever, because it changes the tokens on which the final loss is measured; put it into 'set', for all "
    "runs, or add 'measure' to the file"
)
REFUSED = {
    f"train.{BUCKET}": "all runs would share this bucket; the checkpoints of a sweep stay on the local disk",
    "train.random_seed": "the seeds of a sweep are set by its key 'seeds'",
}


@attrs.frozen(kw_only=True)
class Variant:
    """The base, or the base with some settings changed."""

    name: str
    changes: Changes
    run: Run  # the run with these changes and the changes of `set`


def read_variants(
    file: Path, levers: Any, base: Run, shared: Changes, fixed: Collection[str] = FIXED
) -> tuple[Variant, ...]:
    """Return the base, followed by a variant for each lever value that differs from the base's value.

    `shared` has the changes that apply to all runs, and `fixed` the keys that cannot be levers. Raise BadInput for an
    invalid lever.
    """
    if not isinstance(levers, dict) or not levers:
        raise BadInput(f'{file}: levers: got {quoted(levers)}, expected {{"train.KEY": [VALUE, ...]}}')
    variants = {BASE: Variant(name=BASE, changes={}, run=base)}
    for lever, values in levers.items():
        for name, changes in _choices(file, lever, values, fixed):
            run = changed_run(str(file), base.directory, shared | changes)
            if _keys(run) == _keys(base):
                continue
            if name in variants:
                raise BadInput(f"{file}: levers: two variants are called {quoted(name)}; rename one of them")
            variants[name] = Variant(name=name, changes=changes, run=run)
    if not 1 < len(variants) <= MOST_VARIANTS:
        raise BadInput(
            f"{file}: levers: got {len(variants) - 1:,} variants that differ from the base, expected 1 to 999"
        )
    return tuple(variants.values())


def read_changes(file: Path, where: str, values: Any, fixed: Collection[str] | None = None) -> Changes:
    """Return the changes of a lever, or of `set`, as a mapping from "SECTION.KEY" to value.

    A key in the file may have any form that --set accepts. `fixed` has the keys that cannot be levers; it is None for
    the changes of `set`. Raise BadInput for an unknown key or a key that an experiment cannot change.
    """
    if not isinstance(values, dict) or (fixed is not None and not values):
        raise BadInput(f'{file}: {where}: got {quoted(values)}, expected {{"train.KEY": VALUE}}')
    known_keys = [f"{section}.{key}" for section, keys in KEYS.items() for key in keys]
    changes = {".".join(resolve_key(name)): value for name, value in values.items()}
    for key in changes:
        if key not in known_keys:
            raise BadInput(unknown_key(key, known_keys, f"{file}: {where}"))
        reason = REFUSED.get(key) or (NO_LEVER if key in (fixed or ()) else None)
        if reason is not None:
            raise BadInput(f"{file}: {where}: {key}: {reason}")
    return changes


def _choices(file: Path, name: str, lever: Any, fixed: Collection[str]) -> Iterator[tuple[str, Changes]]:
    """Yield the name and the changes of each variant of a lever.

    A lever is a list of values for one key, or an object that changes several keys and has a name.
    """
    if isinstance(lever, dict):
        if not re.fullmatch(r"[\w.+-]{1,80}", name) or name.startswith("."):
            raise BadInput(f"{file}: levers: {quoted(name)}: the name may only have letters, digits and _ . + -")
        yield name, read_changes(file, f"levers: {name}", lever, fixed)
        return
    if not isinstance(lever, list) or not lever:
        raise BadInput(f"{file}: levers: {name}: got {quoted(lever)}, expected a list of values, or an object")
    for value in lever:
        changes = read_changes(file, "levers", {name: value}, fixed)
        if isinstance(value, list | dict):
            raise BadInput(
                f"{file}: levers: {name}: a value that is a list or an object needs a name: "
                f'{{"NAME": {{"{name}": ...}}}}'
            )
        text = re.sub(r"[^\w.+-]", "_", value if isinstance(value, str) else json.dumps(value))
        yield f"{resolve_key(name)[1]}={text[:80]}", changes


def _keys(run: Run) -> str:
    """Return all settings of a run, including defaults, as text. As text, `true` and 1 are different."""
    return json.dumps([attrs.asdict(run.model), run.train.flat()])


KNOWN = ("base", "levers", "measure", "seeds", "set", "halving")
REMOVED = {
    "mixture": "the mixing law was removed: the noise of a seed affects all measured domains at once, so the law's "
    "intervals were wrong, and it named a best mixture in 20 to 44% of the cases in which there was nothing to gain; "
    "instead, add 'measure' and one lever for each mixture: "
    '"levers": {"NAME": {"train.dataset": [{"dataset": DIR, "weight": 2}, {"dataset": DIR, "weight": 1}]}}'
}


@attrs.frozen(kw_only=True)
class Halving:
    """Successive halving (Jamieson and Talwalkar 2016, AISTATS) by mean validation loss.

    The base is never stopped.
    """

    factor: float  # at each rung, the best 1 / factor of the variants continue
    rungs: tuple[float, ...]  # shares of a run's steps, ascending; empty without a rule

    def losers(self, means: Mapping[str, float]) -> list[str]:
        """Return the variants that the rule stops. `means` has the mean loss of each variant.

        If two variants have the same loss, the variant that comes first in the file continues.
        """
        ranked = sorted(means, key=means.__getitem__)
        return ranked[max(1, math.ceil(len(ranked) / self.factor)) :]


@attrs.frozen(kw_only=True)
class Sweep:
    """A sweep file after all checks. The first variant is the base."""

    file: Path
    base: Path
    changes: Changes  # the key "set": changes that apply to all runs
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    halving: Halving
    measure: SharedMeasure | None  # the ranges for the final loss; None means the runs' own validation loss


def read_sweep(file: Path) -> Sweep:
    """Read a sweep file. Raise BadInput if the file is invalid; the error names the file and the key."""
    advice = 'expected {"base": RUN, "levers": {"train.KEY": [VALUE, ...]}, "seeds": N}'
    values = read_experiment(file, KNOWN, advice, removed=REMOVED)
    base = values.get("base")
    if not isinstance(base, str):
        raise BadInput(f"{file}: base: got {quoted(base)}, expected a run directory, such as runs/quickstart")
    if values.get("halving") is not None and values.get("measure") is not None:
        raise BadInput(
            f"{file}: halving: cannot be combined with 'measure', because halving compares the runs' own validation "
            "losses; remove one of the two keys"
        )
    changes = read_changes(file, "set", values.get("set", {}))
    run = changed_run(str(file), Path(base), changes)
    if run.train.validation.validation_interval is None:
        raise BadInput(
            f"{file}: {base} never validates, but the verdict needs the validation loss; set train.validation_interval"
        )
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
    """Return the name of the run directory of a variant and a seed."""
    return f"{variant}-seed-{seed}"


def _halving(file: Path, rule: Any) -> Halving:
    if rule is None:
        return Halving(factor=1, rungs=())
    valid = isinstance(rule, dict) and set(rule) == {"factor", "rungs"} and isinstance(rule["rungs"], list)
    valid = valid and all(type(value) in (int, float) for value in [rule["factor"], *rule["rungs"]])
    valid = valid and 1 < rule["factor"] < MOST_VARIANTS and bool(rule["rungs"])
    if not valid or not all(low < high for low, high in pairwise([0, *rule["rungs"], 1])):
        raise BadInput(
            f"{file}: halving: got {quoted(rule)}, expected a factor above 1 and ascending shares of the steps, all "
            'below 1, such as {"factor": 3, "rungs": [0.25, 0.5]}'
        )
    return Halving(factor=rule["factor"], rungs=tuple(rule["rungs"]))
