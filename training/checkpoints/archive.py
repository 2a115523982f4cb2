"""Archive of earlier results: moved to `archive/<time>/` of a run directory, never deleted."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.files import write_error
from tokens.tokenizer.tokenizer import RANKS_FILE
from training.checkpoints.atomic_commit import point_best
from training.checkpoints.disk import CHECKPOINTS, checkpoints_of, new_archive
from training.checkpoints.run_record import RESOLVED
from training.checkpoints.saved_state import read_state
from training.checkpoints.storage import Checkpoint, followed_links, name_of, steps_in
from training.checkpoints.verification import verify
from training.telemetry.chart import CHART
from training.telemetry.metrics_log import ANSWERS, EVALUATIONS, METRICS, REPORT, SAMPLES

# Besides checkpoints
RESULTS = (METRICS, EVALUATIONS, ANSWERS, SAMPLES, REPORT, CHART, RESOLVED, RANKS_FILE)


def restore(run_directory: Path) -> list[str]:
    """Rename checkpoints back: those whose replacement was interrupted, and the folders of a copied run.

    A copy that followed links (`cp -rL`, `zip`) has folders in the place of the links `latest` and `best`. An intact
    one whose step's name is free, or is a damaged checkpoint's, gets that name; a second copy goes to the archive. A
    damaged one stays for `directory.find` to refuse. Returns a line for each. Raises BadInput where the run directory
    cannot be changed.
    """
    storage = checkpoints_of(run_directory)
    with _changing(run_directory):
        storage.recover()
        followed = [Checkpoint(storage, link) for link in followed_links(storage)]
        return [_restore_followed(run_directory, copy) for copy in followed if verify(copy) is None]


def archive_all(run_directory: Path) -> Path | None:
    """Move the results of earlier runs into `archive/<time>/`, for a start from step 0; return that folder.

    Raises BadInput where the run directory cannot be changed.
    """
    storage = checkpoints_of(run_directory)
    with _changing(run_directory):
        results = [path for name in RESULTS if _has_content(path := run_directory / name)]
        checkpoints = [*storage.names(), *storage.left_behind()]
        if not results and not checkpoints:
            return None
        target = new_archive(run_directory)
        if checkpoints:
            storage.set_aside(target)
        for path in results:
            _move(path, target / path.name)
        return target


def describe(archived: Path) -> str:
    """Return an archive's path, with that of its checkpoints where they have stayed on another file system."""
    checkpoints = archived / CHECKPOINTS
    return f"{archived}, checkpoints in {checkpoints.resolve()}" if checkpoints.is_symlink() else str(archived)


def archive_after(run_directory: Path, checkpoint: Checkpoint) -> Path | None:
    """Make a checkpoint the newest: move later ones into `archive/<time>/`; return where they are, if there were any.

    A copy under another name gets its step's name; one of that name is moved as well, and so are damaged folders in
    the place of links. Raises BadInput where the run directory cannot be changed.
    """
    storage = checkpoint.storage
    position = read_state(checkpoint).position
    newest = name_of(position.step)
    is_copy = checkpoint.name != newest
    with _changing(run_directory):
        displaced = [name for name in steps_in(storage) if name > newest] + followed_links(storage)
        if is_copy:
            storage.copy(checkpoint.name, newest)
            displaced += [newest] if storage.exists(newest) else []
        target = storage.set_aside(new_archive(run_directory), displaced) if displaced else None
        if is_copy:
            storage.publish(newest)
        storage.point("latest", newest)
        if not point_best(storage, position.best_step):
            storage.point("best", None)
        return target


def _restore_followed(run_directory: Path, copy: Checkpoint) -> str:
    """Rename an intact folder in a link's place to its step's name, and make the link; return a line about it."""
    storage = copy.storage
    named = Checkpoint(storage, name_of(read_state(copy).position.step))
    line = f"NOTE: {copy} is no link, as after a copy that followed links; it is now "
    if storage.exists(named.name) and verify(named) is None:
        archived = storage.set_aside(new_archive(run_directory), [copy.name])
        line += f"{archived / copy.name}, because {named.name} is intact"
    else:
        if storage.exists(named.name):
            storage.set_aside(new_archive(run_directory), [named.name])
        storage.rename(copy.name, named.name)
        line += str(named)
    storage.point(copy.name, named.name)
    return line


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


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


@contextmanager
def _changing(run_directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise write_error(error.filename or run_directory, error) from error
