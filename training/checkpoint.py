"""Checkpoints: directories of safetensors and JSON that one process, DDP and FSDP read alike.

    checkpoints/step-00000617/model.safetensors       weights, plain names, no vocabulary padding
                              optimizer.safetensors   exp_avg.<name>, exp_avg_sq.<name>
                              state.json              the step, and what resuming needs
                              manifest.json           sizes and sha256, written last
    checkpoints/latest, best                          links, swapped atomically

A checkpoint is written under a hidden name, synced to disk and renamed: under its own name it is complete.
"""

import hashlib
import json
import re
import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from errors import BadInput
from files import sha256, sync
from model.config import ModelConfig
from model.pretrained import padded, unpadded
from tokens.tokenizer import RANKS_FILE
from training.chart import CHART
from training.config import Run
from training.metrics import METRICS
from training.parallel import full_tensor, like
from training.ranks import together
from training.step import Trainer

WEIGHTS, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
RESOLVED = "resolved.json"
PARTIAL = ".partial-"
FORMAT = 2  # of state.json
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch.optim.AdamW's names


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


def save(run: Run, trainer: Trainer, run_state: RunState, config: dict[str, Any]) -> None:
    """Write a checkpoint, move `latest` and `best`, delete what is not kept. Call it on every rank.

    Raises BadInput on every rank when it cannot be written; older checkpoints are not touched then.
    """
    tensors = _full_state(trainer)
    state = {
        "format": FORMAT,
        **attrs.asdict(run_state),
        "optimizer_steps": _optimizer_steps(trainer),
        "loss_scale": trainer.loss_scale.state(),
        "guard": trainer.guard.state(),
        "state_sha256": _hash(tensors, run_state.step),
        "config": config,
    }
    path = run.directory / "checkpoints" / name_of(run_state.step)

    def write() -> None:
        try:
            _write(path, tensors, state)
            point(path.parent, "latest", path.name)
            if run_state.best_step == run_state.step:
                point(path.parent, "best", path.name)
            _delete_old(path.parent, run.train.keep_checkpoints)
        except (OSError, SafetensorError) as error:  # a full disk comes as either
            raise BadInput(
                f"{path}: cannot be written: {error}; older checkpoints are untouched: free disk space and run the "
                "same command again"
            ) from error

    together(trainer.ranks, write, only=trainer.ranks.coordinates)


def state_sha256(trainer: Trainer, step: int) -> str | None:
    """Return the hash of weights, both moments and the step; None but on rank 0. Call it on every rank."""
    tensors = _full_state(trainer)
    return _hash(tensors, step) if trainer.ranks.coordinates else None


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
    for name in reversed(_steps(directory)):
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
    earlier = [directory / name for name in reversed(_steps(directory)) if name < name_of(step)]
    return next((path for path in earlier if verify(path) is None), None)


def verify(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None when every file is as it was written."""
    manifest_file = path / MANIFEST
    try:
        files = json.loads(manifest_file.read_text())["files"]
        for name, entry in files.items():
            size = (path / name).stat().st_size
            if size != entry["size_bytes"]:
                return f"{path / name}: got {size} bytes, wanted {entry['size_bytes']}"
            if sha256(path / name) != entry["sha256"]:
                return f"{path / name}: damaged: its sha256 is not the one in {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path}: not a complete checkpoint: {error}"
    return None


def load(path: Path, trainer: Trainer) -> RunState:
    """Put weights, moments and the optimizer's step count in place. Call it on every rank.

    Raises BadInput when the checkpoint is of another model.
    """
    state = read_state(path)
    config = trainer.parallel.network.config
    parameters = trainer.parallel.named_parameters()
    with safe_open(path / WEIGHTS, framework="pt") as weights, safe_open(path / OPTIMIZER, framework="pt") as moments:
        if set(weights.keys()) != set(parameters):
            unlike = sorted(set(weights.keys()) ^ set(parameters))
            raise BadInput(f"{path / WEIGHTS}: parameters differ from model.json, the first is {unlike[0]}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(like(_read(weights, name, name, config), parameter))
                restored = {
                    moment: like(_read(moments, f"{moment}.{name}", name, config), parameter) for moment in MOMENTS
                }
                steps = torch.tensor(float(state["optimizer_steps"]), device=_step_device(trainer))
                trainer.optimizer.state[parameter] = {"step": steps, **restored}
    trainer.loss_scale.load(state["loss_scale"])
    trainer.guard.load(state.get("guard"))  # earlier checkpoints have none
    return RunState(**{field.name: state[field.name] for field in attrs.fields(RunState)})


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's `state.json`. Raises BadInput for another version's."""
    state: dict[str, Any] = json.loads((path / STATE).read_text())
    if state.get("format") != FORMAT:
        raise BadInput(
            f"{path / STATE}: got format {state.get('format')}, wanted {FORMAT}: another version of Lockstep wrote it; "
            "resume with that version, or start anew with --resume never"
        )
    return state


def archive_after(run_directory: Path, path: Path, step: int) -> Path | None:
    """Move checkpoints later than `path` into `archive/<time>/`, so that none is taken for the newest; return where."""
    directory = run_directory / "checkpoints"
    if not (directory / name_of(step)).exists():  # `path` is a copy that was kept under another name
        partial = directory / f"{PARTIAL}{name_of(step)}"
        shutil.copytree(path, partial)
        partial.rename(directory / name_of(step))
    later = [directory / name for name in _steps(directory) if name > name_of(step)]
    if not later:
        return None
    target = _new_archive(run_directory) / "checkpoints"
    target.mkdir()
    for other in later:
        other.rename(target / other.name)
    point(directory, "latest", name_of(step))
    best = read_state(directory / name_of(step))["best_step"]
    if best is not None and (directory / name_of(best)).is_dir():
        point(directory, "best", name_of(best))
    else:
        (directory / "best").unlink(missing_ok=True)
    return target


def archive(run_directory: Path) -> Path | None:
    """Move what earlier runs wrote into `archive/<time>/`, so that a new start loses nothing; return where."""
    written = [run_directory / name for name in ("checkpoints", METRICS, CHART, RESOLVED, RANKS_FILE)]
    existing = [path for path in written if path.exists()]
    if not existing:
        return None
    target = _new_archive(run_directory)
    for path in existing:
        path.rename(target / path.name)
    return target


def point(directory: Path, link: str, name: str) -> None:
    """Make the link name a checkpoint; at no moment is there no link."""
    partial = directory / f"{PARTIAL}{link}"
    partial.unlink(missing_ok=True)
    if (directory / link).is_dir() and not (directory / link).is_symlink():  # a copy that followed the link
        shutil.rmtree(directory / link)
    partial.symlink_to(name)
    partial.replace(directory / link)
    sync(directory)


def _full_state(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Return whole weights and moments on the CPU of rank 0, file by file; empty on other ranks."""
    files: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, OPTIMIZER: {}}
    for name, parameter in trainer.parallel.named_parameters().items():
        moments = trainer.optimizer.state[parameter]
        values: list[tuple[str, str, Tensor]] = [(WEIGHTS, name, parameter)]
        for key in MOMENTS:  # AdamW has none before its first update, which fp16 may have skipped
            moment = moments[key] if key in moments else torch.zeros_like(parameter)
            values.append((OPTIMIZER, f"{key}.{name}", moment))
        for file, key, value in values:
            whole = full_tensor(value)  # collective under FSDP: on every rank
            if trainer.ranks.coordinates:
                stored = unpadded(name, whole, trainer.parallel.network.config)
                files[file][key] = stored.to("cpu").contiguous()
    return files


def _hash(tensors: dict[str, dict[str, Tensor]], step: int) -> str:
    """Return a hash that does not depend on ranks, wrapper or file layout: whole tensors, by name."""
    digest = hashlib.sha256(str(step).encode())
    for file in sorted(tensors):
        for name in sorted(tensors[file]):
            digest.update(name.encode())
            digest.update(tensors[file][name].numpy().tobytes())
    return digest.hexdigest()


def _write(path: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    partial = path.parent / f"{PARTIAL}{path.name}"
    for left_behind in path.parent.glob(f"{PARTIAL}step-*"):
        shutil.rmtree(left_behind)
    try:
        partial.mkdir(parents=True)
        for name, values in tensors.items():
            save_file(values, partial / name)
        (partial / STATE).write_text(json.dumps(state, indent=2) + "\n")
        files = {
            file.name: {"size_bytes": file.stat().st_size, "sha256": sha256(file)} for file in sorted(partial.iterdir())
        }
        (partial / MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n")
        for written in [*partial.iterdir(), partial]:
            sync(written)
    except (OSError, SafetensorError):
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():  # the same step again, after a resume from an older checkpoint
        aside = path.parent / f"{PARTIAL}{path.name}-replaced"
        path.rename(aside)
        partial.rename(path)
        shutil.rmtree(aside)
    else:
        partial.rename(path)
    sync(path.parent)


def _delete_old(directory: Path, keep: int) -> None:
    kept = {(directory / link).resolve().name for link in ("latest", "best")}
    for name in _steps(directory)[:-keep]:
        if name not in kept:
            hidden = directory / f"{PARTIAL}{name}"
            (directory / name).rename(hidden)  # a deletion that is cut short leaves no half checkpoint
            shutil.rmtree(hidden)


def _names(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def _steps(directory: Path) -> list[str]:
    """Return the names of checkpoints that a run wrote, oldest first; copies under other names are left alone."""
    return [name for name in _names(directory) if re.fullmatch(r"step-\d{8}", name)]


def _new_archive(run_directory: Path) -> Path:
    target = run_directory / "archive" / datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    target.mkdir(parents=True)
    return target


def _read(file: Any, key: str, parameter_name: str, config: ModelConfig) -> Tensor:
    return padded(parameter_name, file.get_tensor(key), config)


def _optimizer_steps(trainer: Trainer) -> int:
    """Return how many updates AdamW has applied; fewer than the run's steps where fp16 overflowed."""
    states = [state for state in trainer.optimizer.state.values() if state]
    return int(states[0]["step"].item()) if states else 0


def _step_device(trainer: Trainer) -> torch.device:
    """Return where AdamW wants its step count: fused kernels read it on the GPU."""
    return trainer.ranks.device if trainer.optimizer.defaults["fused"] else torch.device("cpu")
