"""Reference of a recipe, `reference.json`: losses of finished runs over several seeds, and their band."""

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
    """Write the reference of finished runs into a run directory; return lines about it.

    An earlier reference is replaced, and a line says so; any other file of that name is refused.

    Raises BadInput for fewer than FEWEST of different seeds or tokens, one that is not finished or changed its
    settings, and one whose recipe differs from the first one's, or sources or tokenizer of its tokens.
    """
    path = directory / REFERENCE
    size = check_replaceable(path, b'"losses": ', "a reference of report.py", "--reference")
    rows, recipes = [], []
    for run in runs:
        history = read_history(run)
        record, curve = history.record, history.curves.get(Metric.TRAIN_LOSS, NO_LOSS)
        content, prepared = (None, None) if record is None else tokens_of(record)
        found = tenths(curve, record.steps or 1) if record else curve.values
        if record is None or content is None or record.changes or len(found) < MARKS:
            raise BadInput(f"{run}: wanted a finished run, on finished token files, whose settings never changed")
        recipes.append((recipe_of(record), prepared or content))
        if recipes[-1] != recipes[0]:
            raise BadInput(f"{run}: another recipe or other tokens than {runs[0]}")
        rows.append((record.train.random_seed, content, history.used.devices or (UNRECORDED,), found))
    if len({row[:2] for row in rows}) < max(FEWEST, len(runs)):
        raise BadInput(f"--reference: got {len(runs)} runs, wanted at least {FEWEST}, all of different seeds or tokens")
    seeds, tokens, devices, measured = map(list, zip(*rows, strict=True))
    losses = np.round(measured, DIGITS)  # (R, M)
    reference = Reference(
        recipe=recipes[0][0],
        prepared=recipes[0][1] if len(set(tokens)) >= FEWEST else None,  # so many stand for others prepared alike
        devices=sorted({name for names in devices for name in names}),
        band=np.round(prediction_band(losses, TENTH), DIGITS).tolist(),
        seeds=seeds,
        tokens=tokens,
        losses=losses.tolist(),
    )
    with writing(path):
        replace_file(path, json.dumps(attrs.asdict(reference)) + "\n")
    replaced = [note(f"{path}: replaces the reference that was there ({size:,} bytes)")] if size else []
    return [*replaced, f"reference {path}"]
