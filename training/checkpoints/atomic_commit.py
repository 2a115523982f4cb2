"""How a checkpoint gets its name: rank 0's part of a save, safe against a kill between any two of its lines.

A checkpoint is written under a hidden name, synced and renamed, so under its own name it is complete. The links
`latest` and `best` are for people: nothing is resumed by following them.
"""

import json
import re
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from common.files import sha256, sync
from training.checkpoints.directory import LINKS, MANIFEST, PARTIAL, STATE, manifest_text, name_of, steps_in
from training.checkpoints.state_check import FIELDS_SHA256, fields_sha256
from training.checkpoints.tensor_files import OPTIMIZER, WEIGHTS, Share, combined_sha256

CRASH_POINTS = (
    "prepared",
    "share written",
    "hashed",
    "state written",
    "manifest written",
    "old one aside",
    "renamed",
    "durable",
    "latest made",
    "latest moved",
    "best made",
    "best moved",
    "deletion hidden",
    "deleted",
)  # of a save, in order
ASIDE = "-aside"  # ends the hidden name of a checkpoint that is being replaced
_OWN_HIDDEN_NAME = re.compile(rf"{re.escape(PARTIAL)}(step-\d{{8}}({ASIDE})?|{'|'.join(LINKS)})")


def reached(moment: str) -> None:
    """Do nothing at a moment of a save: where tests end the process."""
    assert moment in CRASH_POINTS, moment


def partial_of(path: Path) -> Path:
    """Return where a checkpoint is written until it is complete."""
    return path.parent / f"{PARTIAL}{path.name}"


def prepare(path: Path, share: Share) -> None:
    """Make the two tensor files at their full size, with their headers, for all ranks to write into."""
    restore(path.parent)
    _remove_left_behind(path.parent)
    partial = partial_of(path)
    partial.mkdir(parents=True)
    for name, header in share.headers.items():
        with (partial / name).open("wb") as file:
            file.write(header)
            file.truncate(share.sizes[name])
    reached("prepared")


def seal(path: Path, state: dict[str, Any]) -> None:
    """Hash what all ranks have written, and add state and manifest; then all of it is on the disk."""
    partial = partial_of(path)
    digests = {name: sha256(partial / name) for name in (WEIGHTS, OPTIMIZER)}
    reached("hashed")
    state = state | {"state_sha256": combined_sha256(state["step"], digests)}
    state = state | {FIELDS_SHA256: fields_sha256(state)}
    (partial / STATE).write_text(json.dumps(state, indent=2) + "\n")
    sync(partial / STATE)
    reached("state written")
    digests[STATE] = sha256(partial / STATE)
    files = {name: {"size_bytes": (partial / name).stat().st_size, "sha256": digests[name]} for name in digests}
    (partial / MANIFEST).write_text(manifest_text(files))
    sync(partial / MANIFEST)
    sync(partial)
    reached("manifest written")


def publish(path: Path) -> None:
    """Give the checkpoint its name."""
    aside = path.parent / f"{PARTIAL}{path.name}{ASIDE}"
    if path.exists():  # the same step again: saved before its validation
        path.rename(aside)
        reached("old one aside")
    try:
        partial_of(path).rename(path)
        reached("renamed")
        sync(path.parent)
        sync(path.parent.parent)  # the first checkpoint's folder is new as well
    except OSError:
        if not partial_of(path).exists():
            path.rename(partial_of(path))
        restore(path.parent)
        raise
    reached("durable")


def restore(directory: Path) -> None:
    """Give a checkpoint its name back whose replacement by a newer one was cut short."""
    for aside in directory.glob(f"{PARTIAL}*{ASIDE}"):
        path = directory / aside.name.removeprefix(PARTIAL).removesuffix(ASIDE)
        if not path.exists():
            aside.rename(path)


def discard(path: Path) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(partial_of(path), ignore_errors=True)


def point(directory: Path, link: str, name: str) -> None:
    """Make the link name a checkpoint; at no moment is there no link."""
    if (directory / link).is_symlink() and (directory / link).readlink() == Path(name):
        return
    partial = directory / f"{PARTIAL}{link}"
    _remove(partial)
    if (directory / link).exists() and not (directory / link).is_symlink():
        set_aside(directory / link)
    partial.symlink_to(name)
    reached(f"{link} made")
    partial.replace(directory / link)
    sync(directory)
    reached(f"{link} moved")


def point_best(directory: Path, step: int | None) -> bool:
    """Make `best` name the checkpoint of a step, if there is one; return whether there is."""
    if step is None or not (directory / name_of(step)).is_dir():
        return False
    point(directory, "best", name_of(step))
    return True


def remove_link(directory: Path, link: str) -> None:
    """Remove a link. What has its name and is none goes to the archive."""
    if (directory / link).is_symlink():
        (directory / link).unlink()
    elif (directory / link).exists():
        set_aside(directory / link)


def set_aside(path: Path) -> Path:
    """Move something out of checkpoints/ into `archive/<time>/checkpoints/` of the run directory; return where."""
    target = new_archive(path.parent.parent) / path.parent.name
    target.mkdir()
    return path.rename(target / path.name)


def new_archive(run_directory: Path) -> Path:
    """Make a new folder `archive/<time>/` and return it."""
    target = run_directory / "archive" / datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    target.mkdir(parents=True)
    return target


def delete_old(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and those that the links name."""
    kept = {(directory / link).resolve().name for link in LINKS}
    for name in steps_in(directory)[:-keep]:
        if name not in kept:
            hidden = directory / f"{PARTIAL}{name}"
            (directory / name).rename(hidden)  # a deletion that is cut short leaves no half checkpoint
            reached("deletion hidden")
            _remove(hidden)
            reached("deleted")
    _remove_left_behind(directory)


def _remove_left_behind(directory: Path) -> None:
    """Remove what a save or deletion that was cut short has hidden. Other hidden names are not ours."""
    for path in directory.glob(f"{PARTIAL}*"):
        if _OWN_HIDDEN_NAME.fullmatch(path.name):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
