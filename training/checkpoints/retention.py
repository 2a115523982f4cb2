"""Retention: which checkpoints of a run stay, the space that they need, and the removal of all others.

Nothing else removes a complete checkpoint of a run, on a disk or in a bucket; other modules move them to an archive at
most. Three places remove something near to one: `recover` of atomic_commit.py, the unfinished replacement of a
checkpoint that it restores; `rename` of directory.py, the source after a copy to another file system; and
evaluation/instruct, the temporary run of a fine-tune, with all that is in it. A test lists the functions of this folder
that remove files.
"""

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from common.files import is_folder, partial_of, remove
from common.launch import setting
from common.text import readable_bytes
from model.counts import parameter_count
from training.checkpoints.directory import (
    MANIFEST,
    checkpoints_of,
    link_target,
    name_of,
    names_in,
    point,
    point_best,
    rename,
    stale_partials,
    step_named,
    step_of,
    steps_in,
)
from training.config.train_config import Run
from training.hardware.preflight import DiskNeed

if TYPE_CHECKING:
    from common.bucket import Bucket

CHECKPOINT_BYTES = 12  # a parameter's weight and two moments in fp32, the most that an optimizer here has
DISK_BLOCK_BYTES = 512  # of st_blocks, by POSIX whatever the file system has
OTHERS = 2  # checkpoints on a disk besides the newest ones: the best one, and the one that is being written


def kept_steps(steps: Collection[int], newest: int, best: int | None, keep: int) -> set[int]:
    """Return the steps, of those that have a checkpoint, whose checkpoint stays.

    These are the `keep` newest ones up to `newest`, which was saved just now, and the best one. Later ones stay, too: a
    bucket may have some that were damaged when the run resumed, and nothing there is removed that is not superseded.
    """
    assert keep > 0, "train.json has at least 1"
    recent = sorted(step for step in steps if step <= newest)[-keep:]
    return {step for step in steps if step in recent or step == best or step > newest}


def prune_disk(directory: Path, newest: int, best: int | None, keep: int) -> None:
    """Make the links refer to the newest and the best checkpoint; remove those that do not stay, and hidden leftovers.

    If this disk lacks the checkpoint of the step `best`, the one that the link refers to stays instead.
    """
    point(directory / "latest", name_of(newest))
    # Each time, not only for a new best one: a kill may have come between that one's publication and its link.
    point_best(directory, best)
    steps = [step_of(name) for name in steps_in(directory)]
    kept = kept_steps(steps, newest, step_named(link_target(directory / "best")), keep)
    for step in steps:
        if step not in kept:
            hidden = partial_of(directory / name_of(step))
            rename(directory / name_of(step), hidden)  # first: an interrupted removal leaves no incomplete checkpoint
            remove(hidden)
    remove_stale(directory)


def prune_bucket(bucket: "Bucket", newest: int, best: int | None, keep: int) -> None:
    """Do in a bucket what `prune_disk` does on a disk. Its leftovers are checkpoints without a manifest."""
    from training.checkpoints.lookup import bucket_folders, bucket_link

    folders = bucket_folders(bucket)
    complete = [step_of(name) for name, files in folders.items() if MANIFEST in files]
    bucket.write("latest", name_of(newest).encode())
    if best in complete:
        bucket.write("best", name_of(best).encode())
    else:
        best = step_named(bucket_link(bucket, "best"))
    kept = kept_steps(complete, newest, best, keep)
    removed = {name: files for name, files in folders.items() if step_of(name) not in kept}
    # manifests first: an interrupted removal leaves no incomplete checkpoint
    bucket.delete([f"{name}/{MANIFEST}" for name, files in removed.items() if MANIFEST in files])
    bucket.delete([f"{name}/{file}" for name, files in removed.items() for file in files - {MANIFEST}])


def discard(path: Path) -> None:
    """Remove what was written of a checkpoint that is not published."""
    shutil.rmtree(partial_of(path), ignore_errors=True)


def remove_stale(directory: Path) -> None:
    """Remove the hidden leftovers of interrupted saves and removals."""
    for path in stale_partials(directory):
        remove(path)


def disk_need(run: Run, *, resumes: bool) -> DiskNeed:
    """Return the space that checkpoints will take.

    If the run resumes, that is less what it will delete: checkpoints, and what a killed save has left. A run that
    resumes is never refused: it has saved here before.
    """
    size = CHECKPOINT_BYTES * parameter_count(run.model)
    directory, count = checkpoints_of(run.directory), run.train.checkpoints.keep_checkpoints + OTHERS
    least, there, leftovers = size, 0, 0
    if resumes and any(is_folder(directory / name) for name in names_in(directory)):  # else those there are archived
        files = [file for file in directory.glob("step-*/*") if file.is_file()]
        there = min(sum(file.stat().st_size for file in files), (count - 1) * size)
        # The next save removes them. Their files have their full size from the beginning, but not their blocks.
        hidden = [file for path in stale_partials(directory) for file in path.glob("*")]
        leftovers = sum(DISK_BLOCK_BYTES * file.lstat().st_blocks for file in hidden)
        least = 0
    return DiskNeed(
        directory=directory,
        contents=f"{count} checkpoints of {readable_bytes(size)}, less those there",
        least_bytes=least,
        total_bytes=max(0, count * size - there - leftovers),
        advice=f"free some, make {directory} a link to a larger disk, or keep fewer with {setting(keep_checkpoints=1)}",
        in_place=True,
    )
