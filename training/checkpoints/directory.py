"""The checkpoint directory of a run: names, links, listing and moves.

A checkpoint is a folder of safetensors and JSON files that can be read by a single process, by DDP and by FSDP.

    checkpoints/step-00000617/model.safetensors       weights, plain names, no vocabulary padding
                              optimizer.safetensors   exp_avg.<name>, exp_avg_sq.<name>, momentum_buffer.<name>
                              state.json              position and configuration of the run
                              manifest.json           sizes and sha256, written last
    checkpoints/latest, best                          links, for people

A copy of a run may have something else instead of a link: a folder with the checkpoint itself (`scp -r`, `cp -rL`,
`rsync -L`, `zip -r`), or a small file that contains the checkpoint's name (a download from a bucket, an unpacked
archive). No function may treat such a copy as a run without checkpoints.
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
from common.text import closest

CHECKPOINTS, ARCHIVE = "checkpoints", "archive"  # folders of a run directory
ARCHIVED_HERE = ".archive"  # archive folder next to the checkpoints, if `archive` is on another file system
STEP_NAME = re.compile(r"step-(\d{8})")  # names that a run gives its checkpoints; copies may have any other name
LINKS = ("latest", "best")
NAME_BYTES = 100  # upper limit for the size of a file that contains only the name of a checkpoint
WEIGHTS, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
TENSOR_FILES = (OPTIMIZER, WEIGHTS)  # the larger one first
REPLACED = "-aside"  # suffix of the hidden name of a checkpoint that is being replaced
# Where checkpoints are, relative to the run directory, if a user has copied them to the wrong place
_MISPLACED = ("step-*", "checkpoints/checkpoints/*", "checkpoints/*/step-*")
_HIDDEN_NAME = re.compile(rf"{re.escape(PARTIAL)}({STEP_NAME.pattern}({REPLACED})?|{'|'.join(LINKS)})")


def checkpoints_of(run_directory: Path) -> Path:
    return run_directory / CHECKPOINTS


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint. Names sort in the order of the steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def step_named(name: str | None) -> int | None:
    """Return the step in a checkpoint's name if a run chose that name; None for any other name."""
    match = STEP_NAME.fullmatch(name or "")
    return None if match is None else int(match[1])


def names_in(directory: Path) -> list[str]:
    """Return the names of checkpoints and links, sorted."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(path.name for path in paths if _is_checkpoint_or_link(path))


def steps_in(directory: Path) -> list[str]:
    """Return the names of checkpoints that a run wrote, oldest first, without copies under other names."""
    return [name for name in names_in(directory) if STEP_NAME.fullmatch(name)]


def check_resume_name(run_directory: Path, name: str, *, is_here: bool) -> None:
    """Raise BadInput if the value of --resume is not the name of a checkpoint.

    `is_here`: the checkpoint can only be on this disk, so it must exist now.
    """
    if name in ("auto", "never"):
        return
    directory = checkpoints_of(run_directory)
    if "/" in name:
        got = f"--resume {name}: wanted the name of a checkpoint in {directory}"
        raise BadInput(f"{got}, not a path; pass --resume {Path(name).name or 'latest'}")
    if is_here and not os.path.lexists(directory / name):
        names = names_in(directory)
        close = closest(name, ["auto", "never", *names])
        suggestion = "" if close is None else f"did you mean --resume {close}? "
        existing = ", ".join(names) or "none"
        raise BadInput(f"{directory / name}: no such checkpoint; {suggestion}existing ones: {existing}")


def link_target(path: Path) -> str | None:
    """Return a link's target: a name if the target is next to the link, otherwise a path. None: `path` is not a link.

    A file that contains only the name of a checkpoint is a link as well, because buckets and some archives store links
    in this form.
    """
    if not os.path.islink(path):  # noqa: PTH114  # Path.is_symlink raises for an impossible name
        return _name_in_file(path) if path.name in LINKS else None
    link = path.readlink()
    here = (path.parent / link).parent.resolve() == path.parent.resolve()
    return link.name if here else str(link)


def linked_folders(directory: Path) -> list[Path]:
    """Return the folders that a copy of the run has instead of the links `latest` and `best`, in this order."""
    return [directory / link for link in LINKS if is_folder(directory / link) and link_target(directory / link) is None]


def stale_partials(directory: Path) -> list[Path]:
    """Return the hidden leftovers of interrupted saves and deletions. Other hidden files do not belong to a run."""
    return [path for path in directory.glob(f"{PARTIAL}*") if is_own_partial(path)]


def is_own_partial(path: Path) -> bool:
    """Return whether a hidden name belongs to a checkpoint that is being written or deleted."""
    return _HIDDEN_NAME.fullmatch(path.name) is not None


def misplaced(run_directory: Path) -> list[Path]:
    """Return checkpoints that are somewhere in a run directory, but not where a run looks for them."""
    return [file.parent for pattern in _MISPLACED for file in sorted(run_directory.glob(f"{pattern}/{MANIFEST}"))]


def new_archive(run_directory: Path) -> Path:
    target = run_directory / ARCHIVE / datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    target.mkdir(parents=True)
    return target


def archive(directory: Path, names: Sequence[str], into: Path | None = None) -> Path:
    """Move checkpoints, in this order, to `archive/TIME/checkpoints/`; return the folder that contains them now.

    Checkpoints stay on their file system. If the archive is on another one, they are moved to `.archive/TIME/` next to
    the checkpoints, and `archive/TIME/checkpoints` is a link to that folder. `into`: an existing folder `archive/TIME`,
    to be used instead of a new one.
    """
    archived = into or new_archive(directory.parent)
    target, local_target = archived / directory.name, directory / ARCHIVED_HERE / archived.name
    local_target.mkdir(parents=True)
    try:
        local_target.rename(target)
        with suppress(OSError):  # the folder has other archives
            local_target.parent.rmdir()
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        absolute = directory.parent.resolve() / directory.name / ARCHIVED_HERE / local_target.name
        target.symlink_to(os.path.relpath(absolute, archived.resolve()))
        target = local_target
    for name in names:
        rename(directory / name, target / name)
    return target


def point_best(directory: Path, step: int | None) -> bool:
    """Make `best` refer to the checkpoint of a step if that checkpoint exists, and return whether it exists."""
    if step is None or not is_folder(directory / name_of(step)):
        return False
    point(directory / "best", name_of(step))
    return True


def point(link: Path, name: str | None) -> None:
    """Make a symbolic link refer to a checkpoint, atomically; remove the link if `name` is None.

    A folder or file that has the name of the link is moved to the archive.
    """
    partial = partial_of(link)
    if link.is_symlink() and name is not None and link.readlink() == Path(name):
        return
    remove(partial)
    if link.exists() and link_target(link) is None:
        moved = archive(link.parent, [link.name])
        show(note(f"{link} is not a symbolic link; moved to {moved / link.name}"))
    if name is None:
        link.unlink(missing_ok=True)
        return
    partial.symlink_to(name)
    partial.replace(link)
    sync(link.parent)


def rename(path: Path, target: Path) -> None:
    """Rename a folder. overlayfs cannot rename a folder of a container's image; in that case, move the files instead.

    The manifest is copied last and deleted first, so that one of the two folders is a complete checkpoint even after a
    kill.
    """
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copytree(path, target, symlinks=True, ignore=shutil.ignore_patterns(MANIFEST))
        for copied in (*target.iterdir(), target):
            sync(copied)
        with suppress(FileNotFoundError):  # a damaged checkpoint may have no manifest
            shutil.copy2(path / MANIFEST, target)
            sync(target / MANIFEST)
            sync(target)
            (path / MANIFEST).unlink()
        remove(path)


def _name_in_file(path: Path) -> str | None:
    """Return the name of a checkpoint if a file contains nothing but this name; otherwise None."""
    try:
        content = read_regular(path, NAME_BYTES)
    except OSError:
        return None
    name = content.decode(errors="replace").strip()
    return name if STEP_NAME.fullmatch(name) else None


def _is_checkpoint_or_link(path: Path) -> bool:
    """Return whether a path has the name of a run's checkpoint or link, or contains a checkpoint.

    The directory may contain other files as well: a mounted disk, for example, has `lost+found`.
    """
    if STEP_NAME.fullmatch(path.name) or path.name in LINKS:
        return True
    # os.path.isfile returns False for a folder that this user is not allowed to read.
    has_files = any(os.path.isfile(path / file) for file in (MANIFEST, WEIGHTS))  # noqa: PTH113
    return has_files and not path.name.startswith(".")
