"""Earlier results moved aside, never deleted: `archive/<time>/` of a run directory."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from errors import BadInput
from files import sync
from tokens.tokenizer import RANKS_FILE
from training import commit
from training.chart import CHART
from training.checkpoint import PARTIAL, RESOLVED, name_of, read_state, steps_in
from training.metrics import ANSWERS, EVALUATIONS, METRICS


def restore(run_directory: Path) -> None:
    """Give a checkpoint its name back whose replacement was cut short. Raises BadInput where that cannot be done."""
    with _changing(run_directory):
        commit.restore(run_directory / "checkpoints")


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
        target = _new_archive(run_directory)
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
        target = _new_archive(run_directory) / "checkpoints"
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


@contextmanager
def _changing(run_directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"{run_directory}: cannot be changed: {error}; mend that and run the same command again"
        ) from error


def _new_archive(run_directory: Path) -> Path:
    target = run_directory / "archive" / datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    target.mkdir(parents=True)
    return target
