"""Validation of a checkpoint's `state.json`: types, limits, and its fields against their hashes."""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

from common.errors import LARGEST_INTEGER, quoted
from model.checks import is_number
from training.checkpoints.tensor_files import combined_sha256

FIELDS_SHA256 = "fields_sha256"  # of all other fields; missing in checkpoints of versions that did not write it
STEP_NAME = re.compile(r"step-(\d{8})")


def fields_sha256(state: dict[str, Any]) -> str:
    """Return the sha256 of a state's fields, FIELDS_SHA256 left out, as JSON with sorted keys."""
    values = json.loads(json.dumps({key: value for key, value in state.items() if key != FIELDS_SHA256}))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_fields(state: dict[str, Any]) -> None:
    """Raise ValueError, "KEY: got ..., wanted ...", for a field that is missing, of a wrong type or out of range."""
    for key, (holds, wanted) in _FIELDS.items():
        if key not in state:
            raise ValueError(f"{key}: missing, wanted {wanted}")
        if not holds(state[key]):
            raise ValueError(f"{key}: got {quoted(state[key])}, wanted {wanted}")
    step = state["step"]
    for key in ("optimizer_steps", "best_step"):
        if (state[key] or 0) > step:
            raise ValueError(f"{key}: got {state[key]:,}, wanted at most the step, {step:,}")
    if FIELDS_SHA256 in state and state[FIELDS_SHA256] != fields_sha256(state):
        raise ValueError(f"the fields do not have their {FIELDS_SHA256}")


def check_origin(state: dict[str, Any], folder: str, digests: dict[str, str]) -> None:
    """Raise ValueError unless a checked state is of the folder's step and of the tensor files with these sha256."""
    name = STEP_NAME.fullmatch(folder)
    if name is not None and int(name[1]) != state["step"]:
        raise ValueError(f"step: got {state['step']:,}, wanted {int(name[1]):,} by the folder's name")
    if state["state_sha256"] != combined_sha256(state["step"], digests):
        raise ValueError("state_sha256: is not that of the step and of the two tensor files")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_INTEGER


def _is_measurement(value: Any) -> bool:
    return type(value) in (int, float)  # nan and inf as well


def _is_loss_scale(value: Any) -> bool:
    match value:
        case {"scale": scale, "finite_steps": finite_steps}:
            return is_number(scale) and scale > 0 and is_number(finite_steps) and 0 <= finite_steps <= LARGEST_INTEGER
    return False


def _is_guard(value: Any) -> bool:
    match value:
        case {"losses": [*losses], "grad_norms": [*grad_norms], "skipped_steps": skipped}:
            return _is_count(skipped) and len(losses) == len(grad_norms) and all(map(is_number, losses + grad_norms))
    return False


def _is_config(value: Any) -> bool:
    match value:
        case {"model": {}, "train": {}, "global_batch_size": int(), "numerics": {"determinism": str()}}:
            return all(_is_streams(value.get(key)) for key in ("train_stream", "validation_stream"))
    return False


def _is_streams(value: Any) -> bool:
    def describes(stream: Any) -> bool:
        match stream:
            case {"tokens": None | int(), "sha256": [*digests]}:
                return all(digest is None or isinstance(digest, str) for digest in digests)
        return False

    return value is None or all(map(describes, value if isinstance(value, list) else [value]))


def _optional(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


_COUNT, _MEASUREMENT = (_is_count, "a whole number of at least 0"), (_optional(_is_measurement), "a number or null")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": _COUNT,
    "tokens": _COUNT,
    "elapsed_seconds": (lambda value: is_number(value) and value >= 0, "a number from 0"),
    "validation_loss": _MEASUREMENT,
    "best_step": (_optional(_is_count), "a whole number of at least 0, or null"),
    "best_validation_loss": _MEASUREMENT,
    "optimizer_steps": _COUNT,
    "loss_scale": (_is_loss_scale, "scale and finite_steps"),
    "guard": (_optional(_is_guard), "as many losses as grad_norms, and skipped_steps; or null"),
    "config": (_is_config, "the resolved configuration of a run"),
    "state_sha256": (lambda value: isinstance(value, str), "a sha256"),
}
