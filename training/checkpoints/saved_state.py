"""The content of `state.json` and `manifest.json`, and the verification of a checkpoint.

`state.json` has the position, the optimizer steps, the loss scale and the run record. `manifest.json` has the size and
sha256 of each file. It is written last, so that a checkpoint without an intact manifest counts as not written.
"""

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from common import checks
from common.errors import BadInput, refusing
from common.files import sha256, system_error
from common.json_files import parse_json, read_json, read_regular
from common.text import quoted
from training.checkpoints.directory import MANIFEST, OPTIMIZER, STATE, WEIGHTS, name_of, step_named
from training.checkpoints.run_record import RunRecord, record_fields
from training.precision import SavedLossScale
from training.state import Position

STATE_FORMAT, MANIFEST_FORMAT = 3, 2
FIELDS_SHA256 = "fields_sha256"  # hash of all other fields
_ADVICE = "copy it here again, or delete the checkpoint"


@attrs.frozen(kw_only=True)
class SavedState:
    """Everything in a checkpoint except its tensors."""

    position: Position  # its fields are keys at the top level of the file
    optimizer_steps: int = attrs.field(validator=checks.integer(0))
    loss_scale: SavedLossScale
    config: RunRecord
    state_sha256: str = ""  # set once all ranks have written their tensors

    def text(self) -> str:
        """Return the content of `state.json`."""
        values = attrs.asdict(self) | {"config": self.config.to_json()}
        values = {"format": STATE_FORMAT, **values.pop("position"), **values}
        return json.dumps(values | {FIELDS_SHA256: fields_sha256(values)}, indent=2) + "\n"


def parse_state(values: dict[str, Any]) -> SavedState:
    """Return the state from the JSON of `state.json`.

    Raises ValueError for a wrong field, with the message "KEY: got ..., wanted ...".
    """
    # A file must have every key, even if the class has a default for it.
    for key in (*attrs.fields_dict(Position), *attrs.fields_dict(SavedState)):
        if key not in values and key != "position":
            raise ValueError(f"{key}: missing")
    position = checks.structured(values, Position, unknown_keys=True)
    state_fields = values | {"position": {}, "config": record_fields(values["config"])}
    state = attrs.evolve(checks.structured(state_fields, SavedState, unknown_keys=True), position=position)
    for key, count in (("optimizer_steps", state.optimizer_steps), ("best_step", position.best_step)):
        if (count or 0) > position.step:
            raise ValueError(f"{key}: got {count:,}, wanted at most the step, {position.step:,}")
    if values.get(FIELDS_SHA256) != fields_sha256(values):
        raise ValueError(f"{FIELDS_SHA256} does not match the other fields")
    return state


def read_state(checkpoint: Path, digests: Mapping[str, str] | None = None) -> SavedState:
    """Read `state.json`. If `digests` of the checkpoint's files are given, check that the state belongs to these files.

    Raises BadInput for a missing or damaged file.
    """
    file = checkpoint / STATE
    if not file.exists():
        raise BadInput(
            f"{file}: missing; the checkpoint must be on the disk of every machine, or on a disk that all machines "
            "share",
            alone=True,
        )
    values = read_json(file, advice=_ADVICE)
    check_format(values, str(file))
    with refusing(f"{file}: damaged or edited", _ADVICE, (ValueError, KeyError, TypeError)):
        state = parse_state(values)
        if digests is not None:
            check_identity(checkpoint.name, state, digests)
        return state


def check_format(values: dict[str, Any], where: str) -> None:
    if values.get("format") != STATE_FORMAT:
        raise BadInput(
            f"{where}: got format {quoted(values.get('format'))}, wanted {STATE_FORMAT}: another version of Lockstep "
            "wrote it; resume with that version, or start over with --resume never"
        )


def best_name(checkpoint: Path) -> str | None:
    """Return the name of the best checkpoint so far, as recorded in this checkpoint; None if nothing was validated."""
    step = read_state(checkpoint).position.best_step
    return None if step is None else name_of(step)


def check_identity(name: str, state: SavedState, digests: Mapping[str, str]) -> None:
    """Raise ValueError if a state does not belong to the step in its folder's name, or to files with these digests."""
    step, folder_step = state.position.step, step_named(name)
    if folder_step is not None and folder_step != step:
        raise ValueError(f"step: got {step:,}, wanted {folder_step:,}, as in the folder's name")
    if state.state_sha256 != combined_sha256(step, digests):
        raise ValueError("state_sha256: does not match the step and the two tensor files")


def combined_sha256(step: int, files: Mapping[str, str]) -> str:
    """Return `state_sha256`, the hash of "STEP DIGEST DIGEST"; the digests are the sha256 of weights and optimizer."""
    return hashlib.sha256(f"{step} {files[WEIGHTS]} {files[OPTIMIZER]}".encode()).hexdigest()


def fields_sha256(values: dict[str, Any]) -> str:
    """Return the hash of all fields except this hash itself."""
    hashed_fields = {key: value for key, value in values.items() if key != FIELDS_SHA256}
    return hashlib.sha256(json.dumps(hashed_fields, sort_keys=True).encode()).hexdigest()


@attrs.frozen
class FileDigest:
    size_bytes: int
    sha256: str


def manifest_text(files: Mapping[str, FileDigest]) -> str:
    """Return the text of a manifest with these entries. It also contains a sha256 of the entries."""
    entries = {name: attrs.asdict(entry) for name, entry in files.items()}
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    manifest = {"format": MANIFEST_FORMAT, "files": entries, "files_sha256": digest}
    return json.dumps(manifest, indent=2, sort_keys=True) + "\n"


def manifest_entries(content: bytes) -> dict[str, FileDigest]:
    """Map each file in a manifest to its entry. Raises ValueError, KeyError or TypeError for a damaged manifest."""
    values = parse_json(content)
    files = {name: FileDigest(**entry) for name, entry in values["files"].items()}
    if manifest_text(files).encode() != content or set(files) != {WEIGHTS, OPTIMIZER, STATE}:
        raise ValueError("its sha256 does not match its entries")
    return files


def weights_digest(checkpoint: Path) -> str | None:
    """Return the sha256 of a checkpoint's weights from its manifest; None if the manifest is missing or damaged."""
    try:
        return manifest_entries(read_regular(checkpoint / MANIFEST))[WEIGHTS].sha256
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(checkpoint: Path) -> str | None:
    """Return how a checkpoint is damaged, or None if every file is as it was written."""
    manifest = checkpoint / MANIFEST
    try:
        files = manifest_entries(read_regular(manifest))
        for name, entry in sorted(files.items()):
            file = checkpoint / name
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                raise BadInput(f"{file}: wanted a regular file")
            if status.st_size != entry.size_bytes:
                raise BadInput(f"{file}: got {status.st_size} bytes, wanted {entry.size_bytes}")
            if sha256(file) != entry.sha256:
                raise BadInput(f"{file}: damaged: its sha256 is not the one in {MANIFEST}")
        if read_json(checkpoint / STATE).get("format") == STATE_FORMAT:  # `read_state` refuses other formats by itself
            read_state(checkpoint, {name: entry.sha256 for name, entry in files.items()})
    except BadInput as error:
        return str(error)
    except FileNotFoundError as error:
        return f"{error.filename}: missing"
    except OSError as error:
        return system_error(error) if error.filename else f"{manifest}: {error}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{manifest}: damaged: {error}"
    return None
