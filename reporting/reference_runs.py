"""The reference of a recipe, `reference.json`: the losses of finished runs with several seeds, and their band."""

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from common.errors import BadInput
from common.files import check_replaceable, replace_file, writing
from common.output import Notice, note
from evaluation.shared.significance import prediction_band
from reporting.run_history import read_history
from training.reference import FEWEST, MARKS, NO_LOSS, TENTH, Reference, recipe_of, tenths, tokens_of
from training.telemetry.metrics_log import REFERENCE, Metric

DIGITS = 4
UNRECORDED = "a machine that is not recorded"


def write_reference(runs: Sequence[Path], directory: Path) -> list[str | Notice]:
    """Write the reference of finished runs into a run directory, and return the lines to print about it.

    An earlier reference is replaced, and a line says so. Any other file with that name is an error.

    Raise BadInput if there are fewer than FEWEST runs with different seeds or tokens, or if a run is not finished or
    has changed its settings. All runs must also have the same recipe, and their tokens must have the same sources and
    tokenizer.
    """
    path = directory / REFERENCE
    size = check_replaceable(path, b'"losses": ', "a reference of report.py", "--reference")
    rows, recipes = [], []
    for run in runs:
        history = read_history(run)
        record, curve = history.record, history.curves.get(Metric.TRAIN_LOSS, NO_LOSS)
        content, prepared = (None, None) if record is None else tokens_of(record)
        run_losses = tenths(curve, record.steps or 1) if record else curve.values
        if record is None or content is None or record.changes or len(run_losses) < MARKS:
            raise BadInput(
                f"{run}: cannot be part of a reference: the run must be finished, its token files complete, "
                "and its settings unchanged since the start"
            )
        recipes.append((recipe_of(record), prepared or content))
        if recipes[-1] != recipes[0]:
            raise BadInput(f"{run}: its recipe or its tokens differ from those of {runs[0]}")
        rows.append((record.train.random_seed, content, history.used.devices or (UNRECORDED,), run_losses))
    if len({row[:2] for row in rows}) < max(FEWEST, len(runs)):
        raise BadInput(
            f"--reference: needs at least {FEWEST} runs, each with a different seed or different tokens; "
            f"got {len(runs)} runs"
        )
    seeds, tokens, devices, measured = map(list, zip(*rows, strict=True))
    losses = np.round(measured, DIGITS)  # (R, M)
    reference = Reference(
        recipe=recipes[0][0],
        # With enough different token files, the reference also holds for other files prepared in the same way.
        prepared=recipes[0][1] if len(set(tokens)) >= FEWEST else None,
        devices=sorted({name for names in devices for name in names}),
        band=np.round(prediction_band(losses, TENTH), DIGITS).tolist(),
        seeds=seeds,
        tokens=tokens,
        losses=losses.tolist(),
    )
    with writing(path):
        replace_file(path, json.dumps(attrs.asdict(reference)) + "\n")
    replaced = [note(f"{path}: replaced an earlier reference ({size:,} bytes)")] if size else []
    return [*replaced, f"reference {path}"]
