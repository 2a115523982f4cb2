"""`state.json` of a checkpoint: position, optimizer steps, loss scale and run record; its validation."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from common import checks
from common.errors import BadInput, quoted
from common.json_files import read_json
from training.checkpoints.directory import OPTIMIZER, STATE, STEP_NAME, WEIGHTS, name_of
from training.checkpoints.run_record import RunRecord, with_stream_list
from training.precision import SavedLossScale
from training.state import Position

STATE_FORMAT = 3
FIELDS_SHA256 = "fields_sha256"  # hash of all other fields
_ADVICE = "copy it here again, or delete the checkpoint"


@attrs.frozen(kw_only=True)
class SavedState:
    """All that a checkpoint holds beside its tensors."""

    position: Position  # its fields are keys of the file
    optimizer_steps: int = attrs.field(validator=checks.integer(0))
    loss_scale: SavedLossScale
    config: RunRecord
    state_sha256: str = ""  # known when all ranks have written

    def text(self) -> str:
        values = attrs.asdict(self) | {"config": self.config.to_json()}
        values = {"format": STATE_FORMAT, **values.pop("position"), **values}
        return json.dumps(values | {FIELDS_SHA256: fields_sha256(values)}, indent=2) + "\n"


def parse_state(values: dict[str, Any]) -> SavedState:
    """Return the state that the file's JSON holds.

    Raises ValueError, "KEY: got ..., wanted ...", for a field that is missing, of a wrong type or out of range.
    """
    for key in (*attrs.fields_dict(Position), *attrs.fields_dict(SavedState)):  # their defaults are not for files
        if key not in values and key != "position":
            raise ValueError(f"{key}: missing")
    position = checks.structured(values, Position, unknown_keys=True)
    others = values | {"position": {}, "config": with_stream_list(values["config"])}
    state = attrs.evolve(checks.structured(others, SavedState, unknown_keys=True), position=position)
    for key, count in (("optimizer_steps", state.optimizer_steps), ("best_step", position.best_step)):
        if (count or 0) > position.step:
            raise ValueError(f"{key}: got {count:,}, wanted at most the step, {position.step:,}")
    if values.get(FIELDS_SHA256) != fields_sha256(values):
        raise ValueError(f"the fields do not have their {FIELDS_SHA256}")
    return state


def read_state(checkpoint: Path) -> SavedState:
    """Return a checkpoint's `state.json`. Raises BadInput for a damaged one, or another version's."""
    file = checkpoint / STATE
    if not file.exists():
        raise BadInput(f"{file}: not there; it has to be on every machine's disk, or on one that all share", alone=True)
    values = read_json(file, advice=_ADVICE)
    check_format(values, str(file))
    try:
        return parse_state(values)
    except ValueError as error:
        raise BadInput(f"{file}: damaged or edited: {error}; {_ADVICE}") from error


def check_format(values: dict[str, Any], where: str) -> None:
    """Raise BadInput for the state of another version."""
    if values.get("format") != STATE_FORMAT:
        raise BadInput(
            f"{where}: got format {quoted(values.get('format'))}, wanted {STATE_FORMAT}: another version of Lockstep "
            "wrote it; resume with that version, or start anew with --resume never"
        )


def best_name(checkpoint: Path) -> str | None:
    """Return the name of the best checkpoint, as this one's state has it; None where nothing was validated."""
    step = read_state(checkpoint).position.best_step
    return None if step is None else name_of(step)


def check_origin(checkpoint: Path, digests: Mapping[str, str]) -> None:
    """Raise BadInput unless the state is of the folder's step and of the tensor files with these sha256."""
    state, name = read_state(checkpoint), STEP_NAME.fullmatch(checkpoint.name)
    step, problem = state.position.step, ""
    if name is not None and int(name[1]) != step:
        problem = f"step: got {step:,}, wanted {int(name[1]):,} by the folder's name"
    elif state.state_sha256 != combined_sha256(step, digests):
        problem = "state_sha256: does not match the step and the two tensor files"
    if problem:
        raise BadInput(f"{checkpoint / STATE}: damaged or edited: {problem}; {_ADVICE}")


def combined_sha256(step: int, files: Mapping[str, str]) -> str:
    """Return `state_sha256`: of "STEP DIGEST DIGEST", the sha256 of the weights' and of the optimizer's file."""
    return hashlib.sha256(f"{step} {files[WEIGHTS]} {files[OPTIMIZER]}".encode()).hexdigest()


def fields_sha256(values: dict[str, Any]) -> str:
    """Return the sha256 of the file's other fields as JSON with sorted keys."""
    others = {key: value for key, value in values.items() if key != FIELDS_SHA256}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()
