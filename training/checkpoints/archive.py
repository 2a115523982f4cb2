"""Archive of earlier results: moved to `archive/<time>/` of a run directory, never deleted.

What moves files raises BadInput where the run directory cannot be changed.
"""

import shutil
from contextlib import suppress
from pathlib import Path

from common.files import writing
from tokens.format.manifest import RANKS_FILE
from training.checkpoints.atomic_commit import copy_to_partial, point, point_best, publish
from training.checkpoints.directory import (
    CHECKPOINTS,
    archive,
    checkpoints_of,
    name_of,
    names_in,
    new_archive,
    stale_partials,
    steps_in,
)
from training.checkpoints.run_record import RESOLVED
from training.checkpoints.saved_state import read_state
from training.telemetry.chart import CHART
from training.telemetry.metrics_log import ANSWERS, EVALUATIONS, METRICS, REPORT, SAMPLES

# Besides checkpoints
RESULTS = (METRICS, EVALUATIONS, ANSWERS, SAMPLES, REPORT, CHART, RESOLVED, RANKS_FILE)


def archive_all(run_directory: Path) -> Path | None:
    """Move the results of earlier runs into `archive/<time>/`, for a start from step 0; return that folder."""
    directory = checkpoints_of(run_directory)
    with writing(run_directory, names_file=True):
        paths = [run_directory / name for name in RESULTS]
        results = [path for path in paths if (any(path.iterdir()) if path.is_dir() else path.exists())]
        checkpoints = [*sorted(path.name for path in stale_partials(directory)), *names_in(directory)]
        if not results and not checkpoints:
            return None
        target = new_archive(run_directory)
        if checkpoints:
            archive(directory, checkpoints, target)  # a kill leaves the newest
            with suppress(OSError):  # a link, a mount, or it holds more than checkpoints
                directory.rmdir()
        for path in results:
            _move(path, target / path.name)
        return target


def describe(archived: Path) -> str:
    """Return an archive's path, with that of its checkpoints where they have stayed on another file system."""
    checkpoints = archived / CHECKPOINTS
    return f"{archived}, checkpoints in {checkpoints.resolve()}" if checkpoints.is_symlink() else str(archived)


def archive_after(checkpoint: Path) -> Path | None:
    """Make a checkpoint the newest, under its step's name; archive later ones; return where they are, or None."""
    directory, position = checkpoint.parent, read_state(checkpoint).position
    newest = directory / name_of(position.step)
    is_copy = checkpoint != newest
    with writing(directory.parent, names_file=True):
        displaced = [name for name in steps_in(directory) if name > newest.name]
        if is_copy:
            copy_to_partial(checkpoint, newest)
            displaced += [newest.name] if newest.exists() else []
        target = archive(directory, displaced) if displaced else None
        if is_copy:
            publish(newest)
        point(directory / "latest", newest.name)
        if not point_best(directory, position.best_step):
            point(directory / "best", None)
        return target


def _move(path: Path, target: Path) -> None:
    """Move a result, also to another file system. Of a folder the files move; a link or a mount stays."""
    if path.is_dir():
        target.mkdir()
        for file in path.iterdir():
            shutil.move(file, target / file.name)
        with suppress(OSError):
            path.rmdir()
    elif path.is_symlink():
        target.symlink_to(path.resolve())  # a relative one would lead nowhere
        path.unlink()
    else:
        shutil.move(path, target)
