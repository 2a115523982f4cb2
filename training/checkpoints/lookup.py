"""Lookup of a run's checkpoints: which ones exist on its disk or in its bucket, and which one a command means.

Every command looks a checkpoint up here, so that `latest`, `best`, a step and a name mean the same everywhere, also in
a copy of a run that lost its links. The commands differ only in their choice and in what they refuse:

    find_to_resume      by default the newest intact one; nothing may start over while there is a checkpoint
    find_to_evaluate    by default the best one; also checkpoints of other programs, which have no manifest
    find_before         the newest intact one before a step, to repeat that step
    candidates          those of a bucket, to be downloaded
"""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import BadInput
from common.files import is_folder
from common.output import show, warning
from training.checkpoints.directory import (
    LINKS,
    MANIFEST,
    STATE,
    STEP_NAME,
    checkpoints_of,
    link_target,
    linked_folders,
    misplaced,
    name_of,
    names_in,
    step_of,
    steps_in,
)
from training.checkpoints.saved_state import best_name, read_state, verify

if TYPE_CHECKING:
    from common.bucket import Bucket

NEWEST = ("auto", "latest")  # what --resume calls the newest intact checkpoint; a bucket's `latest` is for people
_MARKS = (MANIFEST, STATE)  # either shows that a folder is, or was, a checkpoint of ours


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


def resolve(directory: Path, name: str) -> tuple[Path, str | None]:
    """Return the checkpoint that a name means, which need not exist, and the target if the name is a link.

    The name is that of a folder, or `latest` or `best`, or another link that a user made.
    """
    target = link_target(directory / name)
    if target is None and name in LINKS:
        return directory / (linked_checkpoint(directory, name) or name), None
    return directory / (target or name), target


def linked_step(directory: Path, link: str) -> int | None:
    """Return the step of the checkpoint that `latest` or `best` means; None if this disk does not have it.

    Raises BadInput if its state is damaged.
    """
    checkpoint, _ = resolve(directory, link)
    return read_state(checkpoint).position.step if os.path.isfile(checkpoint / STATE) else None  # noqa: PTH113


def checkpoint_titled(run_directory: Path, title: str) -> Path:
    """Return the checkpoint that a stored result was measured on; it may be gone.

    `title`: the names of run and checkpoint, with a space between them.
    """
    return checkpoints_of(run_directory) / title.rpartition(" ")[2]


def find_to_resume(directory: Path, name: str) -> Path | None:
    """Return the checkpoint to resume from; None if there is none.

    "auto" is the newest intact checkpoint. It may be a folder in the place of `latest` or `best`: a copy of a run
    often has no other. Raises BadInput if there are checkpoints but none to resume from without being asked.
    """
    if name != "auto":
        return _find_named(directory, name)
    problems: list[str] = []
    for checkpoint in _newest_first(directory):
        problem = verify(checkpoint)
        if problem is None:
            target = link_target(directory / "latest") or ""
            if STEP_NAME.fullmatch(target) and target > checkpoint.name and not is_folder(directory / target):
                problems.insert(0, f"{directory / 'latest'}: refers to {target}, which does not exist")
            for line in problems:
                show(warning(f"{line}; falling back to {checkpoint.name}"))
            return checkpoint
        problems.append(problem)
    if problems:
        raise BadInput(
            f"{problems[0]}; no other checkpoint is intact: copy it here again, or start over with --resume never"
        )
    _check_leftovers(directory)
    return None


def find_to_evaluate(directory: Path, name: str | None) -> Path:
    """Return the checkpoint to evaluate; without a name the best one, or the newest if nothing was validated.

    It may be damaged, or of another program. Raises BadInput if it is not on this disk.
    """
    best = linked_checkpoint(directory, "best") if name is None else None
    if name is None:
        name = "latest" if best is None else "best"
    checkpoint, _ = resolve(directory, name)
    folders = sorted(path.name for path in directory.glob("*/") if not path.name.startswith("."))
    if is_folder(checkpoint) and name in (*folders, *LINKS):
        resolved = checkpoint.resolve()
        renamed = directory / resolved.name
        return renamed if renamed.resolve() == resolved else resolved
    if best is not None:
        newest = "latest" if "latest" in folders else linked_checkpoint(directory, "latest") or "latest"
        raise BadInput(
            f"{directory / 'best'}: the best checkpoint, {best}, is not on this disk; copy it here, or name another "
            f"one: {directory / newest}"
        )
    if not folders:
        raise BadInput(f"{directory}: no checkpoint yet; train the run first")
    raise BadInput(f"{checkpoint}: no such checkpoint; there are {', '.join(folders)}")


def find_before(directory: Path, step: int) -> Path | None:
    """Return the newest complete checkpoint from which `step` is still to come, or None to begin at the start."""
    checkpoints = checkpoints_by_step(directory)
    for checkpoint in [checkpoints[saved] for saved in reversed(checkpoints) if saved < step]:
        if (problem := verify(checkpoint)) is None:
            return checkpoint
        show(warning(f"{problem}; falling back to an earlier one, or the start"))
    return None


def complete_steps(bucket: "Bucket") -> list[str]:
    """Return the names of the complete checkpoints in a bucket, oldest first."""
    return sorted(name for name, files in bucket_folders(bucket).items() if MANIFEST in files)


def candidates(bucket: "Bucket", name: str) -> list[str]:
    """Return the names of the checkpoints to try to resume from, in this order.

    A name in NEWEST means all complete ones, the newest first, because only a download shows whether one is intact.
    """
    steps = complete_steps(bucket)
    if name in NEWEST:
        return steps[::-1]
    if name == "best":
        name = bucket_link(bucket, name)
    return [step for step in steps if step == name]


def check_branch(bucket: "Bucket", step: int, name: str) -> None:
    """Raise BadInput if a run that continues from a step, or starts at 0, would mix with later checkpoints there.

    `name`: of the checkpoint, as --resume has it.
    """
    later = [folder for folder in complete_steps(bucket) if folder > name_of(step)]
    if later and name not in NEWEST:
        here = f"{name_of(step)} is on this disk, " if step > 0 else ""
        raise BadInput(
            f"{bucket.url}: holds {later[-1]}, and --resume {name} begins before it; nothing in a bucket is moved "
            f"away: {here}set checkpoints to another prefix, or delete what is there"
        )


def _find_named(directory: Path, name: str) -> Path:
    checkpoint, target = resolve(directory, name)
    if not is_folder(checkpoint):
        problem = f"{checkpoint}: no such checkpoint"
        if target is not None:
            problem = f"{directory / name}: refers to {target}, which does not exist"
        raise BadInput(f"{problem}; there are {', '.join(names_in(directory)) or 'none'}")
    if target is not None and checkpoint.parent.resolve() != directory.resolve():
        raise BadInput(f"{directory / name}: refers to {target}, in another folder; copy it here")
    if damage := verify(checkpoint):
        raise BadInput(f"{damage}; resume from another one with --resume NAME")
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
                f"{directory / link}: refers to {target}, which does not exist; {instead}, or start over with "
                "--resume never"
            )
    if copies:
        raise BadInput(
            f"{directory}: has no checkpoint of this run under its own name, only {', '.join(copies)}; continue from "
            f"it with --resume {copies[0]}, or start over with --resume never"
        )
    for checkpoint in misplaced(directory.parent):
        raise BadInput(
            f"{checkpoint}: a checkpoint, but not in {directory}; move it there to continue from it, or start over "
            "with --resume never"
        )


def bucket_link(bucket: "Bucket", link: str) -> str:
    """Return the name that a link of the bucket refers to; an empty one where there is no such link."""
    version = bucket.read(link)
    return "" if version is None else version.content.decode(errors="replace").strip()


def bucket_folders(bucket: "Bucket") -> dict[str, set[str]]:
    """Return the files of each checkpoint, complete or not, by its name."""
    folders: dict[str, set[str]] = {}
    for path in bucket.objects():
        name, _, file = path.partition("/")
        if STEP_NAME.fullmatch(name) and file:
            folders.setdefault(name, set()).add(file)
    return folders
