"""Earlier results moved aside, never deleted: `archive/<time>/` of a run directory."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import BadInput
from common.files import is_folder, sync, write_error
from tokens.tokenizer.tokenizer import RANKS_FILE
from training.checkpoints import atomic_commit as commit
from training.checkpoints.directory import PARTIAL, RESOLVED, followed_links, name_of, read_state, steps_in, verify
from training.telemetry.chart import CHART
from training.telemetry.metrics_log import ANSWERS, EVALUATIONS, METRICS


def restore(run_directory: Path) -> list[str]:
    """Give checkpoints their names back: those whose replacement was cut short, and the folders of a copied run.

    A copy that followed links (`cp -rL`, `zip`) has folders in the place of the links `latest` and `best`. An intact
    one whose step's name is free, or is a damaged checkpoint's, gets that name; a second copy goes to the archive. A
    damaged one stays for `checkpoint.find` to refuse. Returns a line for each. Raises BadInput where that cannot be
    done.
    """
    directory = run_directory / "checkpoints"
    if os.path.lexists(directory):
        if not is_folder(directory):
            raise BadInput(f"{directory}: wanted a folder, or a link to one; move it away, or mount its disk")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise write_error(directory, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    with _changing(run_directory):
        commit.restore(directory)
        return [_restore_followed(path) for path in followed_links(directory) if verify(path) is None]


def archive_after(run_directory: Path, path: Path, step: int) -> Path | None:
    """Make `path` the newest checkpoint: move later ones into `archive/<time>/`; return where, if there were any.

    A copy that was kept under another name gets its step's name; what has that name is moved as well. Raises BadInput
    where the run directory cannot be changed.
    """
    with _changing(run_directory):
        return _archive_after(run_directory, path, step)


def archive(run_directory: Path) -> Path | None:
    """Move what earlier runs wrote into `archive/<time>/`, so that a new start loses nothing; return where.

    Raises BadInput where the run directory cannot be changed.
    """
    with _changing(run_directory):
        names = ("checkpoints", METRICS, EVALUATIONS, ANSWERS, CHART, RESOLVED, RANKS_FILE)
        written = [run_directory / name for name in names]
        existing = [path for path in written if path.exists()]
        if not existing:
            return None
        target = commit.new_archive(run_directory)
        for path in existing:
            path.rename(target / path.name)
        return target


def _archive_after(run_directory: Path, path: Path, step: int) -> Path | None:
    directory = run_directory / "checkpoints"
    newest = directory / name_of(step)
    kept_copy = path.resolve() != newest.resolve()
    displaced = [directory / name for name in steps_in(directory) if name > newest.name]
    if kept_copy:
        partial = directory / f"{PARTIAL}{newest.name}"
        shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed here
        shutil.copytree(path, partial)
        for copied in (*partial.iterdir(), partial):
            sync(copied)
        displaced += [newest] if newest.exists() else []
    target = None
    if displaced:
        target = commit.new_archive(run_directory) / "checkpoints"
        target.mkdir()
        for other in displaced:
            other.rename(target / other.name)
    if kept_copy:
        partial.rename(newest)
        sync(directory)
    commit.point(directory, "latest", newest.name)
    if not commit.point_best(directory, read_state(newest)["best_step"]):
        commit.remove_link(directory, "best")
    return target


def _restore_followed(path: Path) -> str:
    """Give an intact checkpoint in a link's place its step's name, and make the link; return a line that says so."""
    named = path.with_name(name_of(read_state(path)["step"]))
    line = f"NOTE: {path} is no link, as after a copy that followed links; it is now "
    if named.exists() and verify(named) is None:
        line += f"{commit.set_aside(path)}, because {named.name} is intact"
    else:
        if named.exists():
            commit.set_aside(named)
        path.rename(named)
        line += str(named)
    commit.point(path.parent, path.name, named.name)
    return line


@contextmanager
def _changing(run_directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise write_error(error.filename or run_directory, error) from error
