"""`state.json` of a checkpoint: position, optimizer steps, loss scale, spike window and run record; its validation."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import attrs

from common.structure import Structured, structured
from model import checks
from training.checkpoints.run_record import RunRecord, read_record
from training.checkpoints.storage import STEP_NAME
from training.checkpoints.tensor_files import combined_sha256
from training.precision import SavedLossScale
from training.spike_guard import SpikeHistory
from training.state import Position

STATE = "state.json"
FORMAT = 3
FIELDS_SHA256 = "fields_sha256"  # of all other fields; missing in checkpoints of versions that did not write it
KEYS = (*attrs.fields_dict(Position), "optimizer_steps", "loss_scale", "guard", "config", "state_sha256")


@attrs.frozen(kw_only=True)
class SavedState:
    """All that a checkpoint holds beside its tensors."""

    position: Position
    optimizer_steps: int = attrs.field(validator=checks.integer(0))
    loss_scale: SavedLossScale
    guard: SpikeHistory | None
    config: RunRecord
    state_sha256: str = ""  # known when all ranks have written

    def text(self) -> str:
        """Return the content of the file."""
        values = {
            "format": FORMAT,
            **attrs.asdict(self.position),
            "optimizer_steps": self.optimizer_steps,
            "loss_scale": attrs.asdict(self.loss_scale),
            "guard": None if self.guard is None else attrs.asdict(self.guard),
            "config": self.config.to_json(),
            "state_sha256": self.state_sha256,
        }
        return json.dumps(values | {FIELDS_SHA256: fields_sha256(values)}, indent=2) + "\n"


def parse_state(values: dict[str, Any]) -> SavedState:
    """Return the state that the file's JSON holds.

    Raises ValueError, "KEY: got ..., wanted ...", for a field that is missing, of a wrong type or out of range.
    """
    for key in KEYS:
        if key not in values:
            raise ValueError(f"{key}: missing, wanted {', '.join(KEYS)}")
    try:
        config = read_record(values["config"])
    except ValueError as error:
        raise ValueError(f"config: {error}") from error
    state = SavedState(
        position=structured(values, Position, unknown_keys=True),
        optimizer_steps=values["optimizer_steps"],
        loss_scale=_part(values, "loss_scale", SavedLossScale),
        guard=None if values["guard"] is None else _part(values, "guard", SpikeHistory),
        config=config,
        state_sha256=_part(values, "state_sha256", str),
    )
    step = state.position.step
    for key, count in (("optimizer_steps", state.optimizer_steps), ("best_step", state.position.best_step)):
        if (count or 0) > step:
            raise ValueError(f"{key}: got {count:,}, wanted at most the step, {step:,}")
    if FIELDS_SHA256 in values and values[FIELDS_SHA256] != fields_sha256(values):
        raise ValueError(f"the fields do not have their {FIELDS_SHA256}")
    return state


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


def _part(values: dict[str, Any], key: str, kind: type[Structured]) -> Structured:
    try:
        return structured(values[key], kind)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
