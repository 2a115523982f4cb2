"""`state.json` and `manifest.json` of a checkpoint: their content, and verification; the newest intact checkpoint.

`state.json` has position, optimizer steps, loss scale and run record. `manifest.json` has the files' sizes and sha256,
and is written last: a checkpoint without an intact manifest does not exist.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from common import checks
from common.errors import BadInput, quoted, refusing, say, warning
from common.files import is_folder, sha256, system_error
from common.json_files import parse_json, read_json, read_regular
from training.checkpoints.directory import (
    LINKS,
    MANIFEST,
    OPTIMIZER,
    STATE,
    STEP_NAME,
    WEIGHTS,
    link_target,
    linked_folders,
    name_of,
    names_in,
    step_of,
    steps_in,
)
from training.checkpoints.run_record import RunRecord, record_fields
from training.precision import SavedLossScale
from training.state import Position

STATE_FORMAT, MANIFEST_FORMAT = 3, 2
FIELDS_SHA256 = "fields_sha256"  # hash of all other fields
_ADVICE = "copy it here again, or delete the checkpoint"
_MARKS = (MANIFEST, STATE)  # either shows that a folder is, or was, a checkpoint of ours
# Where a copy that named a wrong place puts checkpoints, relative to the run directory
_MISPLACED = ("step-*", "checkpoints/checkpoints/*", "checkpoints/*/step-*")


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
    """Return the state of the file's JSON. Raises ValueError, "KEY: got ..., wanted ...", for a wrong field."""
    for key in (*attrs.fields_dict(Position), *attrs.fields_dict(SavedState)):  # their defaults are not for files
        if key not in values and key != "position":
            raise ValueError(f"{key}: missing")
    position = checks.structured(values, Position, unknown_keys=True)
    others = values | {"position": {}, "config": record_fields(values["config"])}
    state = attrs.evolve(checks.structured(others, SavedState, unknown_keys=True), position=position)
    for key, count in (("optimizer_steps", state.optimizer_steps), ("best_step", position.best_step)):
        if (count or 0) > position.step:
            raise ValueError(f"{key}: got {count:,}, wanted at most the step, {position.step:,}")
    if values.get(FIELDS_SHA256) != fields_sha256(values):
        raise ValueError(f"the fields do not have their {FIELDS_SHA256}")
    return state


def read_state(checkpoint: Path, digests: Mapping[str, str] | None = None) -> SavedState:
    """Return `state.json`, checked against its files' `digests` if given. Raises BadInput for a damaged one."""
    file = checkpoint / STATE
    if not file.exists():
        raise BadInput(f"{file}: not there; it has to be on every machine's disk, or on one that all share", alone=True)
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
            "wrote it; resume with that version, or start anew with --resume never"
        )


def best_name(checkpoint: Path) -> str | None:
    """Return the name of the best checkpoint, as this one's state has it; None where nothing was validated."""
    step = read_state(checkpoint).position.best_step
    return None if step is None else name_of(step)


def check_identity(name: str, state: SavedState, digests: Mapping[str, str]) -> None:
    """Raise ValueError unless a state is of its folder's step and of the tensor files with these sha256."""
    step, named = state.position.step, STEP_NAME.fullmatch(name)
    if named is not None and int(named[1]) != step:
        raise ValueError(f"step: got {step:,}, wanted {int(named[1]):,} by the folder's name")
    if state.state_sha256 != combined_sha256(step, digests):
        raise ValueError("state_sha256: does not match the step and the two tensor files")


def combined_sha256(step: int, files: Mapping[str, str]) -> str:
    """Return `state_sha256`: of "STEP DIGEST DIGEST", the sha256 of the weights' and of the optimizer's file."""
    return hashlib.sha256(f"{step} {files[WEIGHTS]} {files[OPTIMIZER]}".encode()).hexdigest()


def fields_sha256(values: dict[str, Any]) -> str:
    others = {key: value for key, value in values.items() if key != FIELDS_SHA256}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


@attrs.frozen
class FileDigest:
    size_bytes: int
    sha256: str


def manifest_text(files: Mapping[str, FileDigest]) -> str:
    """Return the manifest of files by name; it carries a sha256 of itself."""
    entries = {name: attrs.asdict(entry) for name, entry in files.items()}
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    manifest = {"format": MANIFEST_FORMAT, "files": entries, "files_sha256": digest}
    return json.dumps(manifest, indent=2, sort_keys=True) + "\n"


def manifest_entries(content: bytes) -> dict[str, FileDigest]:
    """Return the entries. Raises ValueError, KeyError or TypeError for a damaged manifest."""
    values = parse_json(content)
    files = {name: FileDigest(**entry) for name, entry in values["files"].items()}
    if manifest_text(files).encode() != content or set(files) != {WEIGHTS, OPTIMIZER, STATE}:
        raise ValueError("it does not have its own sha256")
    return files


def weights_digest(checkpoint: Path) -> str | None:
    """Return the sha256 of a checkpoint's weights, by its manifest; None where that is missing or damaged."""
    try:
        return manifest_entries(read_regular(checkpoint / MANIFEST))[WEIGHTS].sha256
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(checkpoint: Path) -> str | None:
    """Return the damage of a checkpoint, or None when every file is as it was written."""
    manifest = checkpoint / MANIFEST
    try:
        files = manifest_entries(read_regular(manifest))
        for name, entry in sorted(files.items()):
            file = checkpoint / name
            found = file.stat()
            if not stat.S_ISREG(found.st_mode):
                raise BadInput(f"{file}: wanted a regular file")
            if found.st_size != entry.size_bytes:
                raise BadInput(f"{file}: got {found.st_size} bytes, wanted {entry.size_bytes}")
            if sha256(file) != entry.sha256:
                raise BadInput(f"{file}: damaged: its sha256 is not the one in {MANIFEST}")
        if read_json(checkpoint / STATE).get("format") == STATE_FORMAT:  # `read_state` refuses another version's
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


def checkpoints_by_step(directory: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, the oldest first. A folder `latest` of a copied run is one of them.

    A folder in the place of a link is left out if its state cannot be read, or if its step has a folder of its own.
    """
    checkpoints = {step_of(name): directory / name for name in steps_in(directory)}
    for folder in linked_folders(directory):
        with suppress(BadInput, OSError):
            checkpoints.setdefault(read_state(folder).position.step, folder)
    return dict(sorted(checkpoints.items()))


def linked_checkpoint(directory: Path, link: str) -> str | None:
    """Return the name of the checkpoint that `latest` or `best` means, also in a copy that lost the links.

    It may name a checkpoint that is not on this disk. None: there is no checkpoint, or nothing was validated. Raises
    BadInput if the newest checkpoint, whose state has the step of the best one, is damaged.
    """
    if (target := link_target(directory / link)) is not None:
        return target
    if is_folder(directory / link):
        return link
    checkpoints = checkpoints_by_step(directory)
    if link == "latest":
        return checkpoints[max(checkpoints)].name if checkpoints else None
    newest = linked_checkpoint(directory, "latest")
    if newest is None or not (directory / newest / STATE).is_file():
        return None
    best = best_name(directory / newest)
    return best if best is None else checkpoints.get(step_of(best), directory / best).name


def find(directory: Path, wanted: str) -> Path | None:
    """Return the checkpoint to resume from; None if there is none.

    "auto" is the newest intact checkpoint. It may be a folder in the place of `latest` or `best`: a copy of a run
    often has no other. Raises BadInput if there are checkpoints but none to resume from without being asked.
    """
    if wanted != "auto":
        return _find_named(directory, wanted)
    problems: list[str] = []
    for checkpoint in _newest_first(directory):
        problem = verify(checkpoint)
        if problem is None:
            target = link_target(directory / "latest") or ""
            if STEP_NAME.fullmatch(target) and target > checkpoint.name and not is_folder(directory / target):
                problems.insert(0, f"{directory / 'latest'}: refers to {target}, which does not exist")
            for line in problems:
                say(warning(f"{line}; falling back to {checkpoint.name}"))
            return checkpoint
        problems.append(problem)
    if problems:
        raise BadInput(
            f"{problems[0]}; no other checkpoint is intact: copy it here again, or start anew with --resume never"
        )
    _check_leftovers(directory)
    return None


def misplaced(run_directory: Path) -> list[Path]:
    """Return checkpoints that are in a run directory, but where no run looks for them."""
    return [file.parent for place in _MISPLACED for file in sorted(run_directory.glob(f"{place}/{MANIFEST}"))]


def find_before(directory: Path, step: int) -> Path | None:
    """Return the newest complete checkpoint from which `step` is still to come, or None to begin at the start."""
    checkpoints = checkpoints_by_step(directory)
    for checkpoint in [checkpoints[saved] for saved in reversed(checkpoints) if saved < step]:
        if (problem := verify(checkpoint)) is None:
            return checkpoint
        say(warning(f"{problem}; falling back to an earlier one, or the start"))
    return None


def _find_named(directory: Path, name: str) -> Path:
    if name in LINKS and not os.path.lexists(directory / name):  # a copy may lack the links
        name = linked_checkpoint(directory, name) or name
    target = link_target(directory / name)
    checkpoint = directory / (target or name)
    if not is_folder(checkpoint):
        reason = "no such checkpoint" if target is None else f"refers to {target}, which does not exist"
        raise BadInput(f"{directory / name}: {reason}; there are {', '.join(names_in(directory)) or 'none'}")
    if target is not None and (directory / target).parent.resolve() != directory.resolve():
        raise BadInput(f"{directory / name}: refers to {target}, in another folder; copy it here")
    if problem := verify(checkpoint):
        raise BadInput(f"{problem}; resume from another one with --resume NAME")
    return checkpoint


def _newest_first(directory: Path) -> list[Path]:
    """Return all folders that "auto" may resume from.

    A folder in the place of a link whose step cannot be read comes first, so that its damage is reported by name.
    """
    steps: dict[Path, float] = {directory / name: step_of(name) for name in steps_in(directory)}
    for folder in linked_folders(directory):
        try:
            steps[folder] = read_state(folder).position.step
        except (BadInput, OSError):
            steps[folder] = math.inf
    return sorted(steps, key=lambda path: (steps[path], path.name), reverse=True)


def _check_leftovers(directory: Path) -> None:
    """Raise BadInput if a folder without a checkpoint of the run has something that shows that there was one."""
    copies = [name for name in names_in(directory) if any((directory / name / file).is_file() for file in _MARKS)]
    for link in LINKS:
        target = link_target(directory / link)
        if target is not None:  # its checkpoint was not copied, or deleted by hand
            instead = f"continue from a copy with --resume {copies[0]}" if copies else "copy it here again"
            raise BadInput(
                f"{directory / link}: refers to {target}, which does not exist; {instead}, or start anew with "
                "--resume never"
            )
    if copies:
        raise BadInput(
            f"{directory}: has no checkpoint of this run under its own name, only {', '.join(copies)}; continue from "
            f"it with --resume {copies[0]}, or start anew with --resume never"
        )
    for checkpoint in misplaced(directory.parent):
        raise BadInput(
            f"{checkpoint}: a checkpoint, but not in {directory}; move it there to continue from it, or start anew "
            "with --resume never"
        )
