"""Retention: which checkpoints of a run stay, the space that they need, and the removal of all others."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from common.files import is_folder, partial_of, remove
from common.quantities import readable_bytes
from model.counts import parameter_count
from training.checkpoints.directory import (
    LINKS,
    MANIFEST,
    checkpoints_of,
    link_target,
    names_in,
    point,
    point_best,
    rename,
    stale_partials,
    steps_in,
)
from training.checkpoints.lookup import bucket_folders, bucket_link
from training.config.train_config import Run
from training.hardware.preflight import DiskNeed

if TYPE_CHECKING:
    from common.bucket import Bucket

CHECKPOINT_BYTES = 12  # a parameter's weight and two moments in fp32, the most that an optimizer here has
DISK_BLOCK_BYTES = 512  # of st_blocks, by POSIX whatever the file system has
BESIDE = 2  # checkpoints beside the newest ones: the best, and the one being written


def prune_checkpoints(directory: Path, newest: str, best_step: int | None, keep: int) -> None:
    """Make the links refer to the newest and the best checkpoint, and delete all but those and the newest `keep`."""
    point(directory / "latest", newest)
    # Each time, not only for a new best one: a kill may have come between that one's publication and its link.
    point_best(directory, best_step)
    kept = {link_target(directory / link) for link in LINKS}
    for name in steps_in(directory)[:-keep]:
        if name not in kept:
            hidden = partial_of(directory / name)
            rename(directory / name, hidden)  # first: an interrupted deletion leaves no incomplete checkpoint
            remove(hidden)
    remove_stale(directory)


def prune_bucket(bucket: "Bucket", name: str, best: str | None, keep: int) -> None:
    """Write `latest` and `best`; delete what kills have left, and older checkpoints.

    The best and the newest `keep` stay, and later ones, which were not intact. `best`: of the run; where the bucket
    lacks it, the one that it has stays.
    """
    folders = bucket_folders(bucket)
    steps = sorted(each for each, files in folders.items() if MANIFEST in files)
    bucket.write("latest", name.encode())
    if best in steps:
        bucket.write("best", str(best).encode())
    else:
        best = bucket_link(bucket, "best")
    kept = {best, *[each for each in steps if each <= name][-keep:], *(each for each in steps if each >= name)}
    old = {each: files for each, files in folders.items() if each not in kept}
    bucket.delete([f"{each}/{MANIFEST}" for each, files in old.items() if MANIFEST in files])  # first: none is partial
    bucket.delete([f"{each}/{file}" for each, files in old.items() for file in files - {MANIFEST}])


def discard(path: Path) -> None:
    shutil.rmtree(partial_of(path), ignore_errors=True)


def disk_need(run: Run, *, resumes: bool) -> DiskNeed:
    """Return the space that checkpoints will take.

    If the run resumes, that is less what it will delete: checkpoints, and what a killed save has left. A run that
    resumes is never refused: it has saved here before.
    """
    size = CHECKPOINT_BYTES * parameter_count(run.model)
    directory, count = checkpoints_of(run.directory), run.train.checkpoints.keep_checkpoints + BESIDE
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
        what=f"{count} checkpoints of {readable_bytes(size)}, less those there",
        least_bytes=least,
        total_bytes=max(0, count * size - there - leftovers),
        advice=f"free some, make {directory} a link to a larger disk, or keep fewer with --set keep_checkpoints=1",
        in_place=True,
    )


def remove_stale(directory: Path) -> None:
    for path in stale_partials(directory):
        remove(path)
