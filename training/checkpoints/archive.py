"""The archive of earlier results, which are moved to `archive/<time>/` in the run directory and never deleted.

Functions that move files raise BadInput if the run directory cannot be changed.
"""

import shutil
from contextlib import suppress
from pathlib import Path

from common.errors import BadInput
from common.files import sync, writing
from tokens.format.manifest import RANKS_FILE
from training.checkpoints.atomic_commit import copy_to_partial, publish
from training.checkpoints.directory import (
    CHECKPOINTS,
    archive,
    checkpoints_of,
    linked_folders,
    name_of,
    names_in,
    new_archive,
    point,
    point_best,
    rename,
    stale_partials,
    steps_in,
)
from training.checkpoints.run_record import RESOLVED
from training.checkpoints.saved_state import read_state, verify
from training.telemetry.chart import CHART
from training.telemetry.metrics_log import ANSWERS, EVALUATIONS, METRICS, REPORT, SAMPLES

# Files that are archived together with the checkpoints
RESULTS = (METRICS, EVALUATIONS, ANSWERS, SAMPLES, REPORT, CHART, RESOLVED, RANKS_FILE)


def archive_all(run_directory: Path) -> Path | None:
    """Move all earlier results into `archive/<time>/` before a start from step 0, and return that folder."""
    directory = checkpoints_of(run_directory)
    with writing(run_directory, names_file=True):
        paths = [run_directory / name for name in RESULTS]
        results = [path for path in paths if (any(path.iterdir()) if path.is_dir() else path.exists())]
        checkpoints = [*sorted(path.name for path in stale_partials(directory)), *names_in(directory)]
        if not results and not checkpoints:
            return None
        target = new_archive(run_directory)
        if checkpoints:
            # The newest checkpoint is moved last, so that it is still in its place after a kill during the moves.
            archive(directory, checkpoints, target)
            with suppress(OSError):  # the directory is a link or a mount, or it contains other files
                directory.rmdir()
        for path in results:
            _move(path, target / path.name)
        return target


def describe(archived: Path) -> str:
    """Return an archive's path, followed by the path of its checkpoints if they are on another file system."""
    checkpoints = archived / CHECKPOINTS
    return f"{archived}, checkpoints in {checkpoints.resolve()}" if checkpoints.is_symlink() else str(archived)


def archive_after(checkpoint: Path) -> Path | None:
    """Make a checkpoint the newest one: archive all later checkpoints, and name this one after its step.

    Returns the folder of the archived checkpoints, or None. A copy of a run may have folders instead of the links
    `latest` and `best`. Such a folder gets the name of its step, and the link is created again. A folder that is
    damaged, or whose step already has a folder, is archived instead.
    """
    directory, position = checkpoint.parent, read_state(checkpoint).position
    newest = directory / name_of(position.step)
    is_copy = checkpoint != newest
    with writing(directory.parent, names_file=True):
        displaced = [name for name in steps_in(directory) if name > newest.name]
        renamed = checkpoint in linked_folders(directory)
        if is_copy:
            displaced += [newest.name] if newest.exists() else []
            if not renamed:
                copy_to_partial(checkpoint, newest)
        target = archive(directory, displaced) if displaced else None
        if renamed:
            rename(checkpoint, newest)
        elif is_copy:
            publish(newest)
        _rename_earlier(directory, newest)
        point(directory / "latest", newest.name)
        if not point_best(directory, position.best_step):
            point(directory / "best", None)
        return target


def _rename_earlier(directory: Path, newest: Path) -> None:
    """Rename the intact folders that a copied run has instead of the links `latest` and `best`.

    A folder whose step is earlier than the step of `newest` is renamed to `step-...`, unless that name is taken.
    """
    for folder in linked_folders(directory):
        if verify(folder) is not None:
            continue
        with suppress(BadInput):  # another version of Lockstep wrote it
            named = folder.with_name(name_of(read_state(folder).position.step))
            if named.name < newest.name and not named.exists():
                rename(folder, named)
    sync(directory)


def _move(path: Path, target: Path) -> None:
    """Move a result, possibly to another file system.

    The files of a folder are moved one at a time; the folder itself stays if it is a link or a mount.
    """
    if path.is_dir():
        target.mkdir()
        for file in path.iterdir():
            shutil.move(file, target / file.name)
        with suppress(OSError):
            path.rmdir()
    elif path.is_symlink():
        target.symlink_to(path.resolve())  # a relative link would be broken after the move
        path.unlink()
    else:
        shutil.move(path, target)
