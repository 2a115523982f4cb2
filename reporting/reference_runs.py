"""Reference of a recipe, `reference.json`: losses of finished runs over several seeds, and their band."""

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from common.errors import BadInput
from common.files import replace_file, writing
from evaluation.shared.significance import prediction_band
from reporting.run_history import read_history
from training.reference import content_of, preparation_of, recipe_of
from training.telemetry.loss_band import MARKS, TENTH, Reference, tenths
from training.telemetry.metrics_log import REFERENCE

FEWEST = 3  # runs, and contents of tokens that stand for others prepared alike
DIGITS = 4


def write_reference(runs: Sequence[Path], directory: Path) -> Path:
    """Write the reference of finished runs into a run directory; return its path.

    Raises BadInput for fewer than FEWEST, one that is not finished or changed its settings, and one of another recipe
    or other tokens than the first; and for two of one seed on the same tokens.
    """
    records, measured, devices = [], [], set()
    for run in runs:
        history = read_history(run)
        record, curve = history.record, history.curves.get("train_loss")
        found = None if record is None or curve is None else tenths(curve, record.steps or 1)
        if record is None or found is None or len(found) < MARKS or record.changes or content_of(record) is None:
            raise BadInput(f"{run}: wanted a finished run, on finished token files, whose settings never changed")
        records.append(record)
        measured.append(found)
        devices.add(str(history.job.environment.device))
    seeds, tokens = [one.train["random_seed"] for one in records], [str(content_of(one)) for one in records]
    if len(set(zip(seeds, tokens, strict=True))) < max(FEWEST, len(runs)):
        raise BadInput(f"--reference: got {len(runs)} runs, wanted at least {FEWEST}, all of different seeds or tokens")
    alike = preparation_of(records[0]) if len(set(tokens)) >= FEWEST else None
    for run, record, content in zip(runs, records, tokens, strict=True):
        other = content != tokens[0] and (alike is None or preparation_of(record) != alike)
        if other or recipe_of(record) != recipe_of(records[0]):
            raise BadInput(f"{run}: another recipe or other tokens than {runs[0]}")
    losses = np.round(measured, DIGITS)  # (R, M)
    reference = Reference(
        recipe=recipe_of(records[0]),
        prepared=alike,
        devices=sorted(devices),
        log_interval=max(record.train["log_interval"] for record in records),
        band=np.round(prediction_band(losses, TENTH), DIGITS).tolist(),
        seeds=seeds,
        tokens=tokens,
        losses=losses.tolist(),
    )
    with writing(directory / REFERENCE):
        replace_file(directory / REFERENCE, json.dumps(attrs.asdict(reference)) + "\n")
    return directory / REFERENCE
