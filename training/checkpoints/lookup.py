"""Lookup of a run's checkpoints: which ones exist on its disk or in its bucket, and which one a command means.

Every command looks up checkpoints here, so that `latest`, `best`, a step and a name mean the same everywhere, even in
a copy of a run that has lost its links. The functions differ in their default and in the checkpoints that they accept:

    find_to_resume      default: the newest intact one; a run must not start over while it has a checkpoint
    find_to_evaluate    default: the best one; accepts checkpoints of other programs, which have no manifest
    find_before         the newest intact one before a step, to repeat that step
    candidates          the checkpoints of a bucket, to be downloaded
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

# Values of --resume that mean the newest intact checkpoint. The file `latest` in a bucket is only for people.
NEWEST = ("auto", "latest")
_MARKS = (MANIFEST, STATE)  # either file shows that a folder is, or was, a checkpoint of Lockstep


def checkpoints_by_step(directory: Path) -> dict[int, Path]:
    """Map the step of each checkpoint of a run to its folder, oldest first.

    In a copied run, `latest` or `best` may be a folder instead of a link. Such a folder is a checkpoint, too. It is
    left out if its state cannot be read, or if the same step also has a folder `step-...`.
    """
    checkpoints = {step_of(name): directory / name for name in steps_in(directory)}
    for folder in linked_folders(directory):
        with suppress(BadInput, OSError):
            checkpoints.setdefault(read_state(folder).position.step, folder)
    return dict(sorted(checkpoints.items()))


def linked_checkpoint(directory: Path, link: str) -> str | None:
    """Return the name of the checkpoint that `latest` or `best` means, even if the folder is a copy without the links.

    That checkpoint may not be on this disk. None means that there is no checkpoint, or that nothing was validated.
    Raises BadInput if the newest checkpoint, whose state contains the step of the best one, is damaged.
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
    """Return the path of the checkpoint that a name means, and the link's target if the name is a link.

    The checkpoint may not exist. The name may be that of a folder, `latest`, `best`, or a link that a user has made.
    """
    target = link_target(directory / name)
    if target is None and name in LINKS:
        return directory / (linked_checkpoint(directory, name) or name), None
    return directory / (target or name), target


def linked_step(directory: Path, link: str) -> int | None:
    """Return the step of the checkpoint that `latest` or `best` means; None if this disk does not have it.

    Raises BadInput if the state of that checkpoint is damaged.
    """
    checkpoint, _ = resolve(directory, link)
    return read_state(checkpoint).position.step if os.path.isfile(checkpoint / STATE) else None  # noqa: PTH113


def checkpoint_titled(run_directory: Path, title: str) -> Path:
    """Return the path of the checkpoint on which a stored result was measured. The checkpoint may no longer exist.

    `title`: the names of the run and the checkpoint, separated by a space.
    """
    return checkpoints_of(run_directory) / title.rpartition(" ")[2]


def find_to_resume(directory: Path, name: str) -> Path | None:
    """Return the checkpoint to resume from; None if there is none.

    "auto" means the newest intact checkpoint. It may be a folder that replaces `latest` or `best`, because a copy of a
    run often has no other folder. Raises BadInput if checkpoints exist but "auto" cannot resume from any of them.
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
            f"{problems[0]}; no other checkpoint is intact: copy this one here again, or start over with --resume never"
        )
    _check_leftovers(directory)
    return None


def find_to_evaluate(directory: Path, name: str | None) -> Path:
    """Return the checkpoint to evaluate. Without a name, this is the best one, or the newest if nothing was validated.

    The checkpoint may be damaged, or written by another program. Raises BadInput if it is not on this disk.
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
    raise BadInput(f"{checkpoint}: no such checkpoint; existing ones: {', '.join(folders)}")


def find_before(directory: Path, step: int) -> Path | None:
    """Return the newest complete checkpoint before `step`; None if there is none and the run must begin at step 0."""
    checkpoints = checkpoints_by_step(directory)
    for checkpoint in [checkpoints[saved] for saved in reversed(checkpoints) if saved < step]:
        if (problem := verify(checkpoint)) is None:
            return checkpoint
        show(warning(f"{problem}; falling back to an earlier checkpoint, or to step 0"))
    return None


def complete_steps(bucket: "Bucket") -> list[str]:
    """Return the names of the complete checkpoints in a bucket, oldest first."""
    return sorted(name for name, files in bucket_folders(bucket).items() if MANIFEST in files)


def candidates(bucket: "Bucket", name: str) -> list[str]:
    """Return the names of a bucket's checkpoints that the run may resume from, starting with the best choice.

    A name in NEWEST means all complete checkpoints, newest first, because only a download shows whether one is intact.
    """
    steps = complete_steps(bucket)
    if name in NEWEST:
        return steps[::-1]
    if name == "best":
        name = bucket_link(bucket, name)
    return [step for step in steps if step == name]


def check_branch(bucket: "Bucket", step: int, name: str) -> None:
    """Raise BadInput if a run that continues from `step` would upload to a bucket that has later checkpoints.

    Those checkpoints belong to another branch of the run, and must not be mixed with the new ones.

    `name`: the value of --resume.
    """
    later = [folder for folder in complete_steps(bucket) if folder > name_of(step)]
    if later and name not in NEWEST:
        downloaded = f" ({name_of(step)} is already on this disk)" if step > 0 else ""
        raise BadInput(
            f'{bucket.url}: has {later[-1]}, but "--resume {name}" would begin before that step, and checkpoints in a '
            f'bucket are never archived; set "checkpoints" to another prefix{downloaded}, or delete the later ones '
            "from the bucket"
        )


def _find_named(directory: Path, name: str) -> Path:
    checkpoint, target = resolve(directory, name)
    if not is_folder(checkpoint):
        problem = f"{checkpoint}: no such checkpoint"
        if target is not None:
            problem = f"{directory / name}: refers to {target}, which does not exist"
        raise BadInput(f"{problem}; existing ones: {', '.join(names_in(directory)) or 'none'}")
    if target is not None and checkpoint.parent.resolve() != directory.resolve():
        raise BadInput(f"{directory / name}: refers to {target}, in another folder; copy it here")
    if damage := verify(checkpoint):
        raise BadInput(f"{damage}; resume from another one with --resume NAME")
    return checkpoint


def _newest_first(directory: Path) -> list[Path]:
    """Return all folders from which "auto" may resume, newest first.

    A folder that replaces a link comes first if its step cannot be read. In this way, its damage is reported.
    """
    steps: dict[Path, float] = {directory / name: step_of(name) for name in steps_in(directory)}
    for folder in linked_folders(directory):
        try:
            steps[folder] = read_state(folder).position.step
        except (BadInput, OSError):
            steps[folder] = math.inf
    return sorted(steps, key=lambda path: (steps[path], path.name), reverse=True)


def _check_leftovers(directory: Path) -> None:
    """Raise BadInput if a run seems to have had a checkpoint, although there is none in the right place.

    The signs are links to missing checkpoints, checkpoints under other names, and checkpoints in a wrong folder.
    """
    copies = [name for name in names_in(directory) if any((directory / name / file).is_file() for file in _MARKS)]
    for link in LINKS:
        target = link_target(directory / link)
        if target is not None:  # the checkpoint was not copied, or was deleted by hand
            instead = f"continue from a copy with --resume {copies[0]}" if copies else "copy it here again"
            raise BadInput(
                f"{directory / link}: refers to {target}, which does not exist; {instead}, or start over with "
                "--resume never"
            )
    if copies:
        raise BadInput(
            f"{directory}: has no checkpoint of this run under its own name, only {', '.join(copies)}; continue from "
            f"a copy with --resume {copies[0]}, or start over with --resume never"
        )
    for checkpoint in misplaced(directory.parent):
        raise BadInput(
            f"{checkpoint}: this checkpoint is not in {directory}; move it there to continue from it, or start over "
            "with --resume never"
        )


def bucket_link(bucket: "Bucket", link: str) -> str:
    """Return the name to which a link in the bucket refers; "" if there is no such link."""
    version = bucket.read(link)
    return "" if version is None else version.content.decode(errors="replace").strip()


def bucket_folders(bucket: "Bucket") -> dict[str, set[str]]:
    """Map the name of each checkpoint in a bucket, complete or not, to the names of its files."""
    folders: dict[str, set[str]] = {}
    for path in bucket.objects():
        name, _, file = path.partition("/")
        if STEP_NAME.fullmatch(name) and file:
            folders.setdefault(name, set()).add(file)
    return folders
