"""Checkpoint directory of a run: names, links, listing and moves.

A checkpoint is a folder of safetensors and JSON that one process, DDP and FSDP read alike.

    checkpoints/step-00000617/model.safetensors       weights, plain names, no vocabulary padding
                              optimizer.safetensors   exp_avg.<name>, exp_avg_sq.<name>, momentum_buffer.<name>
                              state.json              position and configuration of the run
                              manifest.json           sizes and sha256, written last
    checkpoints/latest, best                          links, for people

A copy of a run may have something else in the place of a link: a folder with the checkpoint itself (`scp -r`, `cp -rL`,
`rsync -L`, `zip -r`), or a small file that holds the checkpoint's name (a download from a bucket, an unpacked archive).
Nothing here may treat such a copy as a run without checkpoints.
"""

import errno
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from common.errors import BadInput
from common.files import PARTIAL, is_folder, partial_of, remove, sync
from common.json_files import read_regular
from common.output import note, show

CHECKPOINTS, ARCHIVE = "checkpoints", "archive"  # folders of a run directory
ARCHIVED_HERE = ".archive"  # folder among checkpoints that are on another file system than the archive
STEP_NAME = re.compile(r"step-(\d{8})")  # names that a run gives; copies may have any other
LINKS = ("latest", "best")
NAME_BYTES = 100  # more than a file needs that holds the name of a checkpoint
WEIGHTS, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
TENSOR_FILES = (OPTIMIZER, WEIGHTS)  # the larger one first
REPLACED = "-aside"  # ends the hidden name of a checkpoint that is being replaced
# Where a copy that named a wrong place puts checkpoints, relative to the run directory
_MISPLACED = ("step-*", "checkpoints/checkpoints/*", "checkpoints/*/step-*")
_OWN_HIDDEN_NAME = re.compile(rf"{re.escape(PARTIAL)}({STEP_NAME.pattern}({REPLACED})?|{'|'.join(LINKS)})")


def checkpoints_of(run_directory: Path) -> Path:
    return run_directory / CHECKPOINTS


def name_of(step: int) -> str:
    """Return the checkpoint name of a step; names sort by step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def step_named(name: str | None) -> int | None:
    """Return the step in a name that a run gives a checkpoint; None for any other name."""
    match = STEP_NAME.fullmatch(name or "")
    return None if match is None else int(match[1])


def names_in(directory: Path) -> list[str]:
    """Return the names of checkpoints and links, sorted."""
    return sorted(path.name for path in directory.iterdir() if _is_ours(path)) if directory.is_dir() else []


def steps_in(directory: Path) -> list[str]:
    """Return the names of checkpoints that a run wrote, oldest first; copies under other names are left alone."""
    return [name for name in names_in(directory) if STEP_NAME.fullmatch(name)]


def check_wanted(run_directory: Path, wanted: str, *, is_here: bool) -> None:
    """Raise BadInput where --resume names no checkpoint; `is_here`: it can only be on this disk."""
    if wanted in ("auto", "never"):
        return
    directory = checkpoints_of(run_directory)
    if "/" in wanted:
        got = f"--resume {wanted}: wanted the name of a checkpoint in {directory}"
        raise BadInput(f"{got}, not a path; pass --resume {Path(wanted).name or 'latest'}")
    if is_here and not os.path.lexists(directory / wanted):
        there = ", ".join(names_in(directory)) or "none"
        raise BadInput(f"{directory / wanted}: no such checkpoint; there are {there}")


def link_target(path: Path) -> str | None:
    """Return the target of a link: a name, if it is in the same folder, otherwise a path. None: it is no link.

    A file whose whole content is the name of a checkpoint is a link, too: buckets and some archives store links so.
    """
    if not os.path.islink(path):  # noqa: PTH114  # Path.is_symlink raises for an impossible name
        return _name_in_file(path) if path.name in LINKS else None
    link = path.readlink()
    here = (path.parent / link).parent.resolve() == path.parent.resolve()
    return link.name if here else str(link)


def linked_folders(directory: Path) -> list[Path]:
    """Return the checkpoint folders that a copy has made of the links `latest` and `best`, in this order."""
    return [directory / link for link in LINKS if is_folder(directory / link) and link_target(directory / link) is None]


def stale_partials(directory: Path) -> list[Path]:
    """Return the hidden leftovers of interrupted saves and deletions. Other hidden names are not ours."""
    return [path for path in directory.glob(f"{PARTIAL}*") if is_own_partial(path)]


def is_own_partial(path: Path) -> bool:
    """Tell whether a hidden name is of a checkpoint that is being written or deleted."""
    return _OWN_HIDDEN_NAME.fullmatch(path.name) is not None


def misplaced(run_directory: Path) -> list[Path]:
    """Return checkpoints that are in a run directory, but where no run looks for them."""
    return [file.parent for place in _MISPLACED for file in sorted(run_directory.glob(f"{place}/{MANIFEST}"))]


def new_archive(run_directory: Path) -> Path:
    target = run_directory / ARCHIVE / datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    target.mkdir(parents=True)
    return target


def archive(directory: Path, names: Sequence[str], into: Path | None = None) -> Path:
    """Move checkpoints, in this order, to `archive/TIME/checkpoints/`; return where they are.

    They stay on their file system: where the archive is on another, they go to `.archive/TIME/` beside the
    checkpoints, and `archive/TIME/checkpoints` is a link to it. `into`: an `archive/TIME` that is there already.
    """
    archived = into or new_archive(directory.parent)
    target, near = archived / directory.name, directory / ARCHIVED_HERE / archived.name
    near.mkdir(parents=True)
    try:
        near.rename(target)
        with suppress(OSError):  # it holds others
            near.parent.rmdir()
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        absolute = directory.parent.resolve() / directory.name / ARCHIVED_HERE / near.name
        target.symlink_to(os.path.relpath(absolute, archived.resolve()))
        target = near
    for name in names:
        rename(directory / name, target / name)
    return target


def point_best(directory: Path, step: int | None) -> bool:
    """Make `best` refer to the checkpoint of a step, if there is one; return whether there is."""
    if step is None or not is_folder(directory / name_of(step)):
        return False
    point(directory / "best", name_of(step))
    return True


def point(link: Path, name: str | None) -> None:
    """Replace a symbolic link in one step, or remove it. A folder or other file of that name goes to the archive."""
    partial = partial_of(link)
    if link.is_symlink() and name is not None and link.readlink() == Path(name):
        return
    remove(partial)
    if link.exists() and link_target(link) is None:
        moved = archive(link.parent, [link.name])
        show(note(f"{link} is no link; it is now {moved / link.name}"))
    if name is None:
        link.unlink(missing_ok=True)
        return
    partial.symlink_to(name)
    partial.replace(link)
    sync(link.parent)


def rename(path: Path, target: Path) -> None:
    """Rename a folder; one of a container's image, which overlayfs cannot rename, is copied and deleted.

    Its manifest is copied last and deleted first: a kill leaves it whole under one of both names.
    """
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copytree(path, target, symlinks=True, ignore=shutil.ignore_patterns(MANIFEST))
        for copied in (*target.iterdir(), target):
            sync(copied)
        with suppress(FileNotFoundError):  # damaged
            shutil.copy2(path / MANIFEST, target)
            sync(target / MANIFEST)
            sync(target)
            (path / MANIFEST).unlink()
        remove(path)


def _name_in_file(path: Path) -> str | None:
    """Return the name of a checkpoint, if that is all that a file holds."""
    try:
        content = read_regular(path, NAME_BYTES)
    except OSError:
        return None
    name = content.decode(errors="replace").strip()
    return name if STEP_NAME.fullmatch(name) else None


def _is_ours(path: Path) -> bool:
    """Tell whether a path is named by a run, or holds a checkpoint; a mounted disk has `lost+found`, for one."""
    if STEP_NAME.fullmatch(path.name) or path.name in LINKS:
        return True
    found = any(os.path.isfile(path / file) for file in (MANIFEST, WEIGHTS))  # noqa: PTH113  # False where not allowed
    return found and not path.name.startswith(".")
