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
    """Move checkpoints later than `path` into `archive/<time>/`, so that none is taken for the newest; return where."""
    directory = run_directory / "checkpoints"
    if not (directory / name_of(step)).exists():  # `path` is a copy that was kept under another name
        partial = directory / f"{PARTIAL}{name_of(step)}"
        shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed here
        shutil.copytree(path, partial)
        partial.rename(directory / name_of(step))
    later = [directory / name for name in steps_in(directory) if name > name_of(step)]
    if not later:
        return None
    target = _new_archive(run_directory) / "checkpoints"
    target.mkdir()
    for other in later:
        other.rename(target / other.name)
    point(directory, "latest", name_of(step))
    best = read_state(directory / name_of(step))["best_step"]
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
