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
import re
import sys
from pathlib import Path
from typing import Any

import attrs

from errors import BadInput
from files import sha256
from training.state_files import OPTIMIZER, WEIGHTS, read_state_files
from training.step import Trainer

STATE, MANIFEST = "state.json", "manifest.json"
RESOLVED = "resolved.json"
PARTIAL = ".partial-"
FORMAT = 3  # of state.json
MANIFEST_FORMAT = 2


@attrs.frozen(kw_only=True)
class RunState:
    """What a run is besides its weights and moments. The step says which data, learning rate and dropout come next."""

    step: int = 0  # updates done
    tokens: int = 0  # trained on so far
    elapsed_seconds: float = 0.0  # wall clock, earlier processes included
    validation_loss: float | None = None  # of these weights
    best_step: int | None = None  # of the checkpoints
    best_validation_loss: float | None = None


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
        if not path.is_dir():
            raise BadInput(f"{path}: no such checkpoint; there are {', '.join(_names(directory)) or 'none'}")
        if problem := verify(path):
            raise BadInput(f"{problem}; resume from another one with --resume NAME")
        return path.resolve()
    problems: list[str] = []
    for name in reversed(steps_in(directory)):
        problem = verify(directory / name)
        if problem is None:
            for line in problems:
                print(f"WARNING: {line}; falling back to {name}", file=sys.stderr)
            return directory / name
        problems.append(problem)
    if problems:
        raise BadInput(f"{problems[0]}; no older checkpoint is intact: start anew with --resume never")
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
    manifest_file = path / MANIFEST
    try:
        text = manifest_file.read_text()
        manifest = json.loads(text)
        if manifest["format"] < MANIFEST_FORMAT:
            return f"{manifest_file}: got format {manifest['format']}, wanted {MANIFEST_FORMAT}: of another version"
        files = manifest["files"]
        if manifest_text(files) != text or set(files) != {WEIGHTS, OPTIMIZER, STATE}:
            return f"{manifest_file}: damaged: it does not have its own sha256"
        problems = (_compare(path / name, entry) for name, entry in sorted(files.items()))
        return next((problem for problem in problems if problem is not None), None)
    except FileNotFoundError as error:
        return f"{error.filename}: missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{manifest_file}: damaged: {error}"


def load(path: Path, trainer: Trainer) -> RunState:
    """Put weights, moments and the optimizer's step count in place. Call it on every rank.

    Raises BadInput when the checkpoint is of another model, or cannot be seen from this rank.
    """
    state = read_state(path)
    read_state_files(path, trainer, state["optimizer_steps"])
    trainer.loss_scale.load(state["loss_scale"])
    trainer.guard.load(state["guard"])
    return RunState(**{field.name: state[field.name] for field in attrs.fields(RunState)})


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's `state.json`. Raises BadInput for another version's."""
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text())
    except FileNotFoundError as error:
        raise BadInput(
            f"{path / STATE}: not there; run directories must lie on a disk that all machines share", alone=True
        ) from error
    except ValueError as error:
        raise BadInput(f"{path / STATE}: damaged: not JSON: {error}; put it back, or delete the checkpoint") from error
    if state.get("format") != FORMAT:
        raise BadInput(
            f"{path / STATE}: got format {state.get('format')}, wanted {FORMAT}: another version of Lockstep wrote it; "
            "resume with that version, or start anew with --resume never"
        )
    return state


def steps_in(directory: Path) -> list[str]:
    """Return the names of checkpoints that a run wrote, oldest first; copies under other names are left alone."""
    return [name for name in _names(directory) if re.fullmatch(r"step-\d{8}", name)]


def _compare(file: Path, entry: dict[str, Any]) -> str | None:
    size = file.stat().st_size
    if size != entry["size_bytes"]:
        return f"{file}: got {size} bytes, wanted {entry['size_bytes']}"
    return None if sha256(file) == entry["sha256"] else f"{file}: damaged: its sha256 is not the one in {MANIFEST}"


def _names(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
