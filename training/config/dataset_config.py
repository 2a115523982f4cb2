"""The key `dataset` of train.json: one name, or a list of datasets with weights that may change during the run."""

from collections.abc import Sequence
from typing import Any

import attrs

from common import checks
from common.checks import KeyRow
from common.json_files import is_number
from common.text import quoted
from tokens.batches.mixture import to_shares

MOST_STAGES = 512  # largest total number of stages in a list of datasets
# The accepted values of `dataset`, as errors and the table of keys describe them
DATASET_VALUES = 'a non-empty string, or a list of {"dataset": NAME, "weight": NUMBER}'

Stages = tuple[tuple[int, int | float], ...]

_NAME = checks.text()
_DATASET_ROW = KeyRow(
    meaning='one dataset, in any form that the key "dataset" of train.json accepts, except a list',
    accepted_values=_NAME.accepted_values,
)
_WEIGHT_ROW = KeyRow(
    meaning="share of the sequences, relative to the other weights; with stages, it changes at the given steps",
    accepted_values="a number above 0, or stages [[first step, weight], ...]",
)


def _read_weight(value: Any) -> Stages:
    """Return the stages of a weight as pairs (first step, weight). The first stage starts at step 0.

    `value` is a single weight above 0, or a list of such pairs. Raises ValueError if it is neither.
    """
    if is_number(value) and value > 0:
        return ((0, value),)
    if not isinstance(value, list):
        raise ValueError(f"weight: got {quoted(value)}, wanted {_WEIGHT_ROW.accepted_values}")
    previous_step = -1
    for stage in value:
        pair = isinstance(stage, list) and len(stage) == 2
        first_step, weight = stage if pair else (-1, -1)
        if type(first_step) is not int or first_step <= previous_step or not is_number(weight) or weight < 0:
            raise ValueError(
                f"weight: got stage {quoted(stage)}, wanted [first step, weight] with rising steps and no weight below "
                "0"
            )
        previous_step = first_step
    if not value or value[0][0] != 0:
        raise ValueError(f"weight: got stages {quoted(value)}, wanted a first stage that starts at step 0")
    return tuple((first_step, weight) for first_step, weight in value)


def normalize_dataset(value: Any) -> Any:
    """Return a value of `dataset` in the form in which runs record it.

    In this form, weights are floats, and a single stage is written as a plain weight, not as a list of stages. An
    invalid value is returned unchanged.
    """
    try:
        parts = read_parts(value)
    except (TypeError, ValueError):
        return value
    entries = []
    for part in parts:
        stages = [[first_step, float(weight)] for first_step, weight in part.weights]
        entries.append({"dataset": part.dataset, "weight": stages[0][1] if len(stages) == 1 else stages})
    return value if isinstance(value, str) else entries


@attrs.frozen
class DatasetPart:
    """One entry of the list `dataset`. A single name counts as a list with one entry."""

    dataset: str = attrs.field(validator=_NAME, metadata={KeyRow: _DATASET_ROW})
    weights: Stages = attrs.field(converter=_read_weight, alias="weight", metadata={KeyRow: _WEIGHT_ROW})


def read_parts(value: Any) -> tuple[DatasetPart, ...]:
    """Parse a value of `dataset` into its entries. Raises ValueError if the value is invalid."""
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
            raise ValueError(
                f"entry {number}: {part.dataset:.100} is listed twice; list it once, with the sum of the weights"
            )
        if not any(weight for _, weight in part.weights):
            raise ValueError(
                f"entry {number}: {part.dataset:.100} has weight 0 in every stage; remove it or give it a weight"
            )
        parts[part.dataset] = part
    stages = sum(len(part.weights) for part in parts.values())
    if stages > MOST_STAGES:
        raise ValueError(f"got {stages:,} datasets and stages in total, wanted at most {MOST_STAGES}")
    shares(list(parts.values()))
    return tuple(parts.values())


def shares(parts: Sequence[DatasetPart]) -> list[tuple[int, tuple[int, ...]]]:
    """Return a pair (first step, shares of the datasets) for each step at which a weight changes.

    The shares are integers in the ratio of the weights. Raises ValueError if all weights of a step are 0, or if the
    weights have too many digits to be converted to integers.
    """
    stages = []
    for step in sorted({first_step for part in parts for first_step, _ in part.weights}):
        weights = [[weight for first_step, weight in part.weights if first_step <= step][-1] for part in parts]
        if not any(weights):
            raise ValueError(f"all weights are 0 from step {step:,} on; at least one must be above 0 at every step")
        stages.append((step, to_shares(weights)))
    return stages
