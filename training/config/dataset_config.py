"""`dataset` in train.json: the name of one, or a list of several with weights, which may change by step."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from common.errors import nearest, quoted
from model import checks
from tokens.batches.mixture import to_shares

ENTRY_KEYS = ("dataset", "weight")
MOST_ENTRIES = 256  # of the list; of all its stages twice as many


@attrs.frozen
class DatasetPart:
    """A dataset's part in a mixture."""

    dataset: str
    weights: tuple[tuple[int, int | float], ...]  # (first step, weight), from step 0 on


def read_parts(value: Any) -> tuple[DatasetPart, ...]:
    """Return what a value of `dataset` means. Raises ValueError, "dataset: got ..., wanted ...", for a wrong one."""
    if isinstance(value, str) and value:
        return (DatasetPart(value, ((0, 1),)),)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(
            f"dataset: got {quoted(value)}, wanted a non-empty string, or a list of "
            '{"dataset": NAME, "weight": NUMBER}'
        )
    if len(value) > MOST_ENTRIES:
        raise ValueError(f"dataset: got {len(value):,} datasets, wanted at most {MOST_ENTRIES}; prepare some together")
    parts = tuple(_read_part(f"dataset: entry {number}", entry) for number, entry in enumerate(value, 1))
    names = [part.dataset for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"dataset: got {name:.100} twice, wanted each dataset once; give it the sum of the weights"
            )
    stages = sum(len(part.weights) for part in parts)
    if stages > 2 * MOST_ENTRIES:
        raise ValueError(f"dataset: got {stages:,} stages in all, wanted at most {2 * MOST_ENTRIES}")
    try:
        shares(parts)
    except ValueError as error:
        raise ValueError(f"dataset: {error}") from error
    for part in parts:
        if not any(weight for _, weight in part.weights):
            raise ValueError(f"dataset: got weight 0 for {part.dataset:.100} in every stage; leave it out")
    return parts


def shares(parts: Sequence[DatasetPart]) -> list[tuple[int, tuple[int, ...]]]:
    """Return (first step, each part's share in whole numbers) wherever a weight changes.

    Raises ValueError where they are all 0, or too fine.
    """
    found = []
    for step in sorted({first_step for part in parts for first_step, _ in part.weights}):
        weights = [[weight for first_step, weight in part.weights if first_step <= step][-1] for part in parts]
        if not any(weights):
            raise ValueError(f"got no weight above 0 from step {step:,} on, wanted one at every step")
        found.append((step, to_shares(weights)))
    return found


def _read_part(where: str, entry: Any) -> DatasetPart:
    if not isinstance(entry, Mapping):
        raise ValueError(f'{where}: got {quoted(entry)}, wanted {{"dataset": NAME, "weight": NUMBER}}')
    for key in entry:
        if key not in ENTRY_KEYS:
            raise ValueError(f"{where}: unknown key {quoted(key)}{nearest(str(key), ENTRY_KEYS)}")
    for key in ENTRY_KEYS:
        if key not in entry:
            raise ValueError(f"{where}: key '{key}' is missing")
    name, weight = entry["dataset"], entry["weight"]
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: got dataset {quoted(name)}, wanted a non-empty string")
    if isinstance(weight, Sequence) and not isinstance(weight, str):
        return DatasetPart(name, _read_stages(f"{where}, {name:.100}", weight))
    if not checks.is_number(weight) or weight <= 0:
        raise ValueError(
            f"{where}, {name:.100}: got weight {quoted(weight)}, wanted a number above 0, or stages "
            "[[first step, weight], ...]"
        )
    return DatasetPart(name, ((0, weight),))


def _is_weight(value: Any) -> bool:
    return checks.is_number(value) and value >= 0


def _read_stages(where: str, weight: Sequence[Any]) -> tuple[tuple[int, int | float], ...]:
    rising = -1
    for stage in weight:
        match stage:
            case [first_step, value] if type(first_step) is int and first_step > rising and _is_weight(value):
                rising = first_step
            case _:
                raise ValueError(
                    f"{where}: got stage {quoted(stage)}, wanted [first step, weight], steps rising, no weight below 0"
                )
    if not weight or weight[0][0] != 0:
        raise ValueError(f"{where}: got stages {quoted(weight)}, wanted the first one to begin with step 0")
    return tuple((first_step, value) for first_step, value in weight)
