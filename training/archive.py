"""Earlier results moved aside, never deleted: `archive/<time>/` of a run directory."""

import shutil
from datetime import datetime, timezone
from pathlib import Path

from tokens.tokenizer import RANKS_FILE
from training.chart import CHART
from training.checkpoint import PARTIAL, RESOLVED, name_of, read_state, steps_in
from training.commit import point
from training.metrics import METRICS


def archive_after(run_directory: Path, path: Path, step: int) -> Path | None:
    """Make `path` the newest checkpoint: move later ones into `archive/<time>/`; return where, if there were any.

    A copy that was kept under another name gets its step's name; what has that name is moved as well.
    """
    directory = run_directory / "checkpoints"
    newest = directory / name_of(step)
    kept_copy = path.resolve() != newest.resolve()
    displaced = [directory / name for name in steps_in(directory) if name > newest.name]
    if kept_copy:
        partial = directory / f"{PARTIAL}{newest.name}"
        shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed here
        shutil.copytree(path, partial)
        displaced += [newest] if newest.exists() else []
    target = None
    if displaced:
        target = _new_archive(run_directory) / "checkpoints"
        target.mkdir()
        for other in displaced:
            other.rename(target / other.name)
    if kept_copy:
        partial.rename(newest)
    point(directory, "latest", newest.name)
    best = read_state(newest)["best_step"]
    if best is not None and (directory / name_of(best)).is_dir():
        point(directory, "best", name_of(best))
    else:
        (directory / "best").unlink(missing_ok=True)
    return target


def archive(run_directory: Path) -> Path | None:
    """Move what earlier runs wrote into `archive/<time>/`, so that a new start loses nothing; return where."""
    written = [run_directory / name for name in ("checkpoints", METRICS, CHART, RESOLVED, RANKS_FILE)]
    existing = [path for path in written if path.exists()]
    if not existing:
        return None
    target = _new_archive(run_directory)
    for path in existing:
        path.rename(target / path.name)
    return target


def _new_archive(run_directory: Path) -> Path:
    target = run_directory / "archive" / datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    target.mkdir(parents=True)
    return target
