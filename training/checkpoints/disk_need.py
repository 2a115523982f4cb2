"""Disk space for a run's checkpoints: the next one, and all that the run keeps at a time."""

from model.config import parameter_count
from training.checkpoints.disk import checkpoints_of
from training.config.train_config import Run
from training.hardware.preflight import DiskNeed

STATE_BYTES = 12  # a parameter's weight and two moments in fp32, the most that an optimizer here has
BESIDE = 2  # checkpoints beside the newest ones: the best, and the one being written
BLOCK_BYTES = 512  # of st_blocks


def disk_need(run: Run, *, resumes: bool) -> DiskNeed:
    """Return the space that the run's checkpoints will take, less what it will delete of those there if it resumes.

    A run that resumes has saved here: a lack of space is a warning then.
    """
    size = STATE_BYTES * parameter_count(run.model)
    disk, count = checkpoints_of(run.directory), run.train.checkpoints.keep_checkpoints + BESIDE
    least, there, left = size, 0, 0
    if resumes and any(map(disk.exists, disk.names())):  # else those there go to the archive
        files = [file for file in disk.directory.glob("step-*/*") if file.is_file()]
        there = min(sum(file.stat().st_size for file in files), (count - 1) * size)
        # of an interrupted save, removed by the next; its files have their full size from the beginning
        left = sum(BLOCK_BYTES * file.lstat().st_blocks for path in disk.left_behind() for file in path.glob("*"))
        least = 0
    return DiskNeed(
        directory=disk.directory,
        what=f"{count} checkpoints of {size / 1e9:.2f} GB, less those there",
        least_bytes=least,
        total_bytes=max(0, count * size - there - left),
        advice=f"free some, make {disk.directory} a link to a larger disk, or keep fewer with --set keep_checkpoints=1",
        in_place=True,
    )
