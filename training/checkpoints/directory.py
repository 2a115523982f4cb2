"""Checkpoints: directories of safetensors and JSON that one process, DDP and FSDP read alike.

    checkpoints/step-00000617/model.safetensors       weights, plain names, no vocabulary padding
                              optimizer.safetensors   exp_avg.<name>, exp_avg_sq.<name>, momentum_buffer.<name>
                              state.json              the step, and what resuming needs
                              manifest.json           sizes and sha256, written last
    checkpoints/latest, best                          links, for people

Here they are found, verified and loaded; `saver.py` and `commit.py` write them.
"""

import hashlib
import json
import stat
import sys
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, printable, quoted
from common.files import is_folder, sha256, system_error
from common.json_files import parse_json, read_json, read_regular
from training.checkpoints.state_check import STEP_NAME, check_fields, check_origin
from training.checkpoints.tensor_files import OPTIMIZER, WEIGHTS, read_state_files
from training.state import Position, TrainState

STATE, MANIFEST = "state.json", "manifest.json"
RESOLVED = "resolved.json"
LINKS = ("latest", "best")
PARTIAL = ".partial-"
FORMAT = 3  # of state.json
MANIFEST_FORMAT = 2


def name_of(step: int) -> str:
    """Return the checkpoint name of a step; names sort by step."""
    return f"step-{step:08d}"


def find(run_directory: Path, wanted: str) -> Path | None:
    """Return the checkpoint to resume from: "auto" is the newest complete one, or None where there is none at all.

    Raises BadInput when checkpoints exist but none verifies, or the named one is missing or damaged.
    """
    directory = run_directory / "checkpoints"
    if wanted != "auto":
        path = directory / wanted
        if not is_folder(path):
            raise BadInput(f"{path}: no such checkpoint; there are {', '.join(_names(directory)) or 'none'}")
        if problem := verify(path):
            raise BadInput(f"{problem}; resume from another one with --resume NAME")
        return path.resolve()
    problems: list[str] = []
    followed = [path.name for path in followed_links(directory)]  # damaged, or they had their step's name by now
    for name in [*reversed(steps_in(directory)), *followed]:
        problem = verify(directory / name)
        if problem is None:
            for line in problems:
                print(printable(f"WARNING: {line}; falling back to {name}"), file=sys.stderr)
            return directory / name
        problems.append(problem)
    if problems:
        raise BadInput(
            f"{problems[0]}; no other checkpoint is intact: copy it here again, or start anew with --resume never"
        )
    copies = [name for name in _names(directory) if (directory / name / MANIFEST).is_file()]
    for link in LINKS:
        if (directory / link).is_symlink():  # its checkpoint was not copied, or deleted by hand
            instead = f"continue from a copy with --resume {copies[0]}" if copies else "bring it back"
            raise BadInput(
                f"{directory / link}: names {(directory / link).readlink()}, which is not there; {instead}, or start "
                "anew with --resume never"
            )
    if copies:
        print(printable(f"NOTE: {directory}: got only {', '.join(copies)}; --resume {copies[0]} continues from that"))
    return None


def find_before(run_directory: Path, step: int) -> Path | None:
    """Return the newest complete checkpoint from which `step` is still to come, or None to begin at the start."""
    directory = run_directory / "checkpoints"
    earlier = [directory / name for name in reversed(steps_in(directory)) if name < name_of(step)]
    return next((path for path in earlier if verify(path) is None), None)


def manifest_text(files: dict[str, dict[str, Any]]) -> str:
    """Return a manifest of {name: {size_bytes, sha256}}; it carries a sha256 of itself."""
    entries = json.dumps(files, sort_keys=True)
    manifest = {
        "format": MANIFEST_FORMAT,
        "files": files,
        "files_sha256": hashlib.sha256(entries.encode()).hexdigest(),
    }
    return json.dumps(manifest, indent=2, sort_keys=True) + "\n"


def verify(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None when every file is as it was written."""
    try:
        _check_files(path)
    except BadInput as error:
        return str(error)
    except FileNotFoundError as error:
        return f"{error.filename}: missing"
    except OSError as error:
        return system_error(error) if error.filename else f"{path / MANIFEST}: {error}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{path / MANIFEST}: damaged: {error}"
    return None


def load(path: Path, train_state: TrainState) -> None:
    """Load a checkpoint into the training state. Call it on every rank.

    Raises BadInput when the checkpoint is of another model, or cannot be seen from this rank.
    """
    state = read_state(path)
    read_state_files(path, train_state, state["optimizer_steps"])
    train_state.loss_scale.load(state["loss_scale"])
    train_state.guard.load(state["guard"])
    train_state.position = Position(**{field.name: state[field.name] for field in attrs.fields(Position)})


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's `state.json`. Raises BadInput for a damaged one, or another version's."""
    if not (path / STATE).exists():
        raise BadInput(
            f"{path / STATE}: not there; run directories must lie on a disk that all machines share", alone=True
        )
    state = _read_state(path)
    if state.get("format") != FORMAT:
        raise BadInput(
            f"{path / STATE}: got format {quoted(state.get('format'))}, wanted {FORMAT}: another version of Lockstep "
            "wrote it; resume with that version, or start anew with --resume never"
        )
    return state


def steps_in(directory: Path) -> list[str]:
    """Return the names of checkpoints that a run wrote, oldest first; copies under other names are left alone."""
    return [name for name in _names(directory) if STEP_NAME.fullmatch(name)]


def followed_links(directory: Path) -> list[Path]:
    """Return the folders in the place of the links, the newest first: made by a copy of a run that followed links."""
    return [directory / link for link in LINKS if (directory / link).is_dir() and not (directory / link).is_symlink()]


def _read_state(path: Path) -> dict[str, Any]:
    """Return `state.json`, its fields checked where they are of this version. Raises BadInput."""
    file, advice = path / STATE, "put it back, or delete the checkpoint"
    state: dict[str, Any] = read_json(file, advice=advice)
    if state.get("format") == FORMAT:
        try:
            check_fields(state)
        except ValueError as error:
            raise BadInput(f"{file}: damaged or edited: {error}; {advice}") from error
    return state


def _check_files(path: Path) -> None:
    """Raise BadInput for a file that is not as the manifest says; any error for a manifest that is damaged."""
    content = read_regular(path / MANIFEST)
    manifest = parse_json(content)
    if manifest["format"] < MANIFEST_FORMAT:
        raise BadInput(
            f"{path / MANIFEST}: got format {manifest['format']}, wanted {MANIFEST_FORMAT}: of another version"
        )
    files = manifest["files"]
    if manifest_text(files).encode() != content or set(files) != {WEIGHTS, OPTIMIZER, STATE}:
        raise ValueError("it does not have its own sha256")
    for name, entry in sorted(files.items()):
        _compare(path / name, entry)
    state = _read_state(path)
    if state.get("format") == FORMAT:  # of another version: `read_state` says so
        try:
            check_origin(state, path.name, {name: entry["sha256"] for name, entry in files.items()})
        except ValueError as error:
            raise BadInput(f"{path / STATE}: edited: {error}") from error


def _compare(file: Path, entry: dict[str, Any]) -> None:
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise BadInput(f"{file}: wanted a regular file")
    if found.st_size != entry["size_bytes"]:
        raise BadInput(f"{file}: got {found.st_size} bytes, wanted {entry['size_bytes']}")
    if sha256(file) != entry["sha256"]:
        raise BadInput(f"{file}: damaged: its sha256 is not the one in {MANIFEST}")


def _names(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
