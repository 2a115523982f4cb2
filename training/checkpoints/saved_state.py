"""`state.json` of a checkpoint: position, optimizer steps, loss scale, spike window and run record; its validation."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from common.errors import LARGEST_INTEGER, quoted
from model.checks import is_number
from training.checkpoints.run_record import RunRecord, read_record
from training.checkpoints.storage import STEP_NAME
from training.checkpoints.tensor_files import combined_sha256
from training.state import Position

STATE = "state.json"
FORMAT = 3
FIELDS_SHA256 = "fields_sha256"  # of all other fields; missing in checkpoints of versions that did not write it


@attrs.frozen(kw_only=True)
class SavedState:
    """All that a checkpoint holds beside its tensors."""

    position: Position
    optimizer_steps: int
    loss_scale: dict[str, float]  # training/precision.py
    guard: dict[str, Any] | None  # training/spike_guard.py
    config: RunRecord
    state_sha256: str = ""  # known when all ranks have written

    def text(self) -> str:
        """Return the content of the file."""
        values = {
            "format": FORMAT,
            **attrs.asdict(self.position),
            "optimizer_steps": self.optimizer_steps,
            "loss_scale": self.loss_scale,
            "guard": self.guard,
            "config": self.config.to_json(),
            "state_sha256": self.state_sha256,
        }
        return json.dumps(values | {FIELDS_SHA256: fields_sha256(values)}, indent=2) + "\n"


def parse_state(values: dict[str, Any]) -> SavedState:
    """Return the state that the file's JSON holds.

    Raises ValueError, "KEY: got ..., wanted ...", for a field that is missing, of a wrong type or out of range.
    """
    for key, (holds, wanted) in _FIELDS.items():
        if key not in values:
            raise ValueError(f"{key}: missing, wanted {wanted}")
        if not holds(values[key]):
            raise ValueError(f"{key}: got {quoted(values[key])}, wanted {wanted}")
    try:
        config = read_record(values["config"])
    except ValueError as error:
        raise ValueError(f"config: got {quoted(values['config'])}, wanted the record of a run: {error}") from error
    step = values["step"]
    for key in ("optimizer_steps", "best_step"):
        if (values[key] or 0) > step:
            raise ValueError(f"{key}: got {values[key]:,}, wanted at most the step, {step:,}")
    if FIELDS_SHA256 in values and values[FIELDS_SHA256] != fields_sha256(values):
        raise ValueError(f"the fields do not have their {FIELDS_SHA256}")
    return SavedState(
        position=Position(**{field.name: values[field.name] for field in attrs.fields(Position)}),
        config=config,
        **{key: values[key] for key in ("optimizer_steps", "loss_scale", "guard", "state_sha256")},
    )


def check_origin(state: SavedState, folder: str, digests: Mapping[str, str]) -> None:
    """Raise ValueError unless a state belongs to the folder's step and to the tensor files with these sha256."""
    name, step = STEP_NAME.fullmatch(folder), state.position.step
    if name is not None and int(name[1]) != step:
        raise ValueError(f"step: got {step:,}, wanted {int(name[1]):,} by the folder's name")
    if state.state_sha256 != combined_sha256(step, digests):
        raise ValueError("state_sha256: does not match the step and the two tensor files")


def fields_sha256(values: dict[str, Any]) -> str:
    """Return the sha256 of the file's other fields as JSON with sorted keys."""
    others = json.loads(json.dumps({key: value for key, value in values.items() if key != FIELDS_SHA256}))
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


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
    "config": (lambda value: isinstance(value, dict), "the record of a run"),
    "state_sha256": (lambda value: isinstance(value, str), "a sha256"),
}
