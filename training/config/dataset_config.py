"""`dataset` in train.json: the name of one, or a list of several with weights, which may change by step."""

from collections.abc import Sequence
from typing import Any

import attrs

from common import checks
from common.checks import KeyRow
from common.json_files import is_number
from common.text import quoted
from tokens.batches.mixture import to_shares

MOST_STAGES = 512  # of all datasets of the list
# The accepted values of `dataset`, as errors and the table of keys name them
DATASET_VALUES = 'a non-empty string, or a list of {"dataset": NAME, "weight": NUMBER}'

Stages = tuple[tuple[int, int | float], ...]

_NAME = checks.text()
_DATASET_ROW = KeyRow(
    meaning="one dataset, in a form that the key of train.json takes", accepted_values=_NAME.accepted_values
)
_WEIGHT_ROW = KeyRow(
    meaning="share of the sequences, in proportion to the other weights; stages change it from a step on",
    accepted_values="a number above 0, or stages [[first step, weight], ...]",
)


def _read_weight(value: Any) -> Stages:
    """Return (first step, weight) from step 0 on: `value` is one weight above 0, or such pairs."""
    if is_number(value) and value > 0:
        return ((0, value),)
    if not isinstance(value, list):
        raise ValueError(f"weight: got {quoted(value)}, wanted {_WEIGHT_ROW.accepted_values}")
    before = -1
    for stage in value:
        pair = isinstance(stage, list) and len(stage) == 2
        first_step, weight = stage if pair else (-1, -1)
        if type(first_step) is not int or first_step <= before or not is_number(weight) or weight < 0:
            raise ValueError(
                f"weight: got stage {quoted(stage)}, wanted [first step, weight], steps rising, no weight below 0"
            )
        before = first_step
    if not value or value[0][0] != 0:
        raise ValueError(f"weight: got stages {quoted(value)}, wanted the first one to begin with step 0")
    return tuple((first_step, weight) for first_step, weight in value)


def one_form_of_dataset(value: Any) -> Any:
    """Return a value of `dataset` with its weights as floats, and one stage as a weight; a wrong one as it is."""
    try:
        parts = read_parts(value)
    except (TypeError, ValueError):
        return value
    forms = []
    for part in parts:
        stages = [[first_step, float(weight)] for first_step, weight in part.weights]
        forms.append({"dataset": part.dataset, "weight": stages[0][1] if len(stages) == 1 else stages})
    return value if isinstance(value, str) else forms


@attrs.frozen
class DatasetPart:
    """An entry of the list that `dataset` may be."""

    dataset: str = attrs.field(validator=_NAME, metadata={KeyRow: _DATASET_ROW})
    weights: Stages = attrs.field(converter=_read_weight, alias="weight", metadata={KeyRow: _WEIGHT_ROW})


def read_parts(value: Any) -> tuple[DatasetPart, ...]:
    """Return the datasets that a value of `dataset` names. Raises ValueError for a wrong one."""
    if isinstance(value, str) and value:
        return (DatasetPart(value, 1),)
    if not isinstance(value, list) or not value:
        raise ValueError(f"got {quoted(value)}, wanted {DATASET_VALUES}")
    parts: dict[str, DatasetPart] = {}
    for number, entry in enumerate(value, 1):
        try:
            part = checks.checked(DatasetPart, entry)
        except ValueError as error:
            raise ValueError(f"entry {number}: {error}") from error
        if part.dataset in parts:
            raise ValueError(f"entry {number}: got {part.dataset:.100} twice; give it the sum of the weights")
        if not any(weight for _, weight in part.weights):
            raise ValueError(f"entry {number}: got weight 0 for {part.dataset:.100} in every stage")
        parts[part.dataset] = part
    stages = sum(len(part.weights) for part in parts.values())
    if stages > MOST_STAGES:
        raise ValueError(f"got {stages:,} datasets and stages in all, wanted at most {MOST_STAGES}")
    shares(list(parts.values()))
    return tuple(parts.values())


def shares(parts: Sequence[DatasetPart]) -> list[tuple[int, tuple[int, ...]]]:
    """Return (first step, shares in whole numbers) wherever a weight changes. Raises ValueError: all 0, too fine."""
    found = []
    for step in sorted({first_step for part in parts for first_step, _ in part.weights}):
        weights = [[weight for first_step, weight in part.weights if first_step <= step][-1] for part in parts]
        if not any(weights):
            raise ValueError(f"got no weight above 0 from step {step:,} on, wanted one at every step")
        found.append((step, to_shares(weights)))
    return found
