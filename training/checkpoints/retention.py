"""Retention: which checkpoints of a run are kept, how much space they need, and the removal of the rest.

No other module removes a complete checkpoint of a run, on a disk or in a bucket; other modules only move checkpoints to
an archive. Three functions remove something that resembles a checkpoint: `recover` in atomic_commit.py removes the
unfinished replacement of the checkpoint that it restores; `rename` in directory.py removes the source after it has been
copied to another file system; and evaluation/instruct removes the temporary run of a fine-tune with its checkpoints. A
test lists the functions of this folder that remove files.
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

CHECKPOINT_BYTES = 12  # per parameter: its weight and two moments in fp32; no optimizer here has more moments
DISK_BLOCK_BYTES = 512  # unit of st_blocks according to POSIX, whatever the file system uses
EXTRA_CHECKPOINTS = 2  # checkpoints on a disk besides the newest ones: the best one, and one that is being written


def kept_steps(steps: Collection[int], newest: int, best: int | None, keep: int) -> set[int]:
    """Return the steps whose checkpoints are kept.

    These are the best step, and the `keep` newest steps up to `newest`, the step that was just saved. Later steps are
    kept as well. A bucket has such steps if their checkpoints were damaged when the run resumed, and nothing in a
    bucket is removed before it is superseded.
    """
    assert keep > 0, "keep_checkpoints in train.json is at least 1"
    recent = sorted(step for step in steps if step <= newest)[-keep:]
    return {step for step in steps if step in recent or step == best or step > newest}


def prune_disk(directory: Path, newest: int, best: int | None, keep: int) -> None:
    """Make the links refer to the newest and the best checkpoint, and remove checkpoints that are not kept.

    Hidden leftovers are removed, too. If this disk does not have the checkpoint of the step `best`, the checkpoint to
    which the link `best` refers is kept instead.
    """
    point(directory / "latest", name_of(newest))
    # This is done every time, because a kill may have left the best checkpoint published but without its link.
    point_best(directory, best)
    steps = [step_of(name) for name in steps_in(directory)]
    steps_to_keep = kept_steps(steps, newest, step_named(link_target(directory / "best")), keep)
    for step in steps:
        if step not in steps_to_keep:
            hidden = partial_of(directory / name_of(step))
            # The checkpoint is renamed first, so that an interrupted removal leaves no incomplete checkpoint.
            rename(directory / name_of(step), hidden)
            remove(hidden)
    remove_stale(directory)


def prune_bucket(bucket: "Bucket", newest: int, best: int | None, keep: int) -> None:
    """Do the same as `prune_disk` in a bucket, where leftovers are checkpoints without a manifest."""
    from training.checkpoints.lookup import bucket_folders, bucket_link

    folders = bucket_folders(bucket)
    complete = [step_of(name) for name, files in folders.items() if MANIFEST in files]
    bucket.write("latest", name_of(newest).encode())
    if best in complete:
        bucket.write("best", name_of(best).encode())
    else:
        best = step_named(bucket_link(bucket, "best"))
    steps_to_keep = kept_steps(complete, newest, best, keep)
    removed = {name: files for name, files in folders.items() if step_of(name) not in steps_to_keep}
    # Manifests are deleted first, so that an interrupted removal leaves no checkpoint that looks complete.
    bucket.delete([f"{name}/{MANIFEST}" for name, files in removed.items() if MANIFEST in files])
    bucket.delete([f"{name}/{file}" for name, files in removed.items() for file in files - {MANIFEST}])


def discard(path: Path) -> None:
    """Remove the files of a checkpoint that has not been published."""
    shutil.rmtree(partial_of(path), ignore_errors=True)


def remove_stale(directory: Path) -> None:
    """Remove the hidden leftovers of interrupted saves and removals."""
    for path in stale_partials(directory):
        remove(path)


def disk_need(run: Run, *, resumes: bool) -> DiskNeed:
    """Return the disk space that the run's checkpoints will need.

    If the run resumes, space that it will free is subtracted: existing checkpoints, and the leftovers of a killed save.
    A run that resumes is never refused, because it has saved checkpoints here before.
    """
    size = CHECKPOINT_BYTES * parameter_count(run.model)
    directory, count = checkpoints_of(run.directory), run.train.checkpoints.keep_checkpoints + EXTRA_CHECKPOINTS
    least, existing, leftovers = size, 0, 0
    # A run that does not resume moves its existing checkpoints to the archive, where they are kept.
    if resumes and any(is_folder(directory / name) for name in names_in(directory)):
        files = [file for file in directory.glob("step-*/*") if file.is_file()]
        existing = min(sum(file.stat().st_size for file in files), (count - 1) * size)
        # The next save removes the leftovers. Their files have full size, but not all of their blocks are allocated.
        hidden = [file for path in stale_partials(directory) for file in path.glob("*")]
        leftovers = sum(DISK_BLOCK_BYTES * file.lstat().st_blocks for file in hidden)
        least = 0
    return DiskNeed(
        directory=directory,
        contents=f"{count} checkpoints of {readable_bytes(size)}, minus the existing ones",
        least_bytes=least,
        total_bytes=max(0, count * size - existing - leftovers),
        advice=(
            f"free some space, make {directory} a link to a larger disk, or keep fewer checkpoints with "
            f"{setting(keep_checkpoints=1)}"
        ),
        in_place=True,
    )
