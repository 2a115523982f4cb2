"""Reference of a run directory, `reference.json`: losses of finished runs, and their band for another of the recipe.

Compared is the mean training loss over the tenth of the run before each of 40 marks, with bounds that hold it at all
marks for 95 of 100 further runs. `report.py RUN... --reference DIR` writes the file.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import attrs
import numpy as np

from common.checks import ValueCheck, integer, number, structured
from common.errors import BadInput
from common.files import HUB
from common.json_files import read_json
from common.output import Notice, note, progress, show
from training.checkpoints.run_record import RunRecord, manifest_of
from training.config.train_config import KEYS, recipe
from training.telemetry.curves import Curve, run_curves
from training.telemetry.metrics_log import REFERENCE, Metric, MetricsLog, read_metrics

MARKS, TENTH = 40, 4  # M at equal distances, and those in a tenth of the run
NAMED = 3  # differences
FEWEST = 3  # runs of a reference
ROUNDED = 1e-3  # more than the rounding of a reference's numbers
NO_LOSS = Curve(np.zeros(0), np.zeros(0))
_EACH_SEED = ValueCheck(lambda seeds: all(map(integer(0).holds, seeds)), "whole numbers from 0")
_EACH_LOSS = ValueCheck(lambda rows: all(number(0).holds(loss) for row in rows for loss in row), "losses from 0")


@attrs.frozen(kw_only=True)
class Reference:
    """Losses of R runs of one recipe, and the band for another one's: means over tenths, nats per token."""

    recipe: dict[str, Any]
    prepared: str | None  # sources and tokenizer of any tokens that count; None: those of `tokens` alone
    devices: list[str]
    band: list[list[float]]  # lowest and highest loss (2, M); the lowest may be below zero
    seeds: list[int] = attrs.field(validator=_EACH_SEED)  # R
    tokens: list[str]  # identity of each run's training tokens (R)
    losses: list[list[float]] = attrs.field(validator=_EACH_LOSS)  # (R, M)

    def __attrs_post_init__(self) -> None:
        runs = len(self.losses)
        if runs < FEWEST or not len(self.seeds) == len(self.tokens) == runs:
            counts = f"{runs} losses, {len(self.seeds)} seeds and {len(self.tokens)} tokens"
            raise ValueError(f"losses: got {counts}, wanted those of {FEWEST} runs or more, one of each for a run")
        if len({*zip(self.seeds, self.tokens, strict=True)}) < runs:
            raise ValueError("seeds: got two runs of one seed and the same tokens, wanted different ones")
        if len(self.band) != 2 or any(len(each) != MARKS for each in (*self.band, *self.losses)):
            raise ValueError(f"band, losses: wanted {MARKS} numbers each, and two bounds")
        if any(low > high for low, high in zip(*self.band, strict=True)):
            raise ValueError("band: wanted the lowest losses first, then the highest")
        low, high = np.array(self.band)
        means = np.mean(self.losses, axis=0)  # the band is around them; it and they are rounded
        if ((means < low - ROUNDED) | (means > high + ROUNDED)).any():
            raise ValueError("band: does not hold the mean of the losses at each mark, so it is of other losses")


class ComparedLog(MetricsLog):
    """Metrics log of a run with a reference: tells when the training loss leaves or enters the band, and at the end."""

    def __init__(self, directory: Path, compared: RunRecord):
        super().__init__(directory)
        self._directory, self._compared, self._mark, self._news = directory, compared, -1, ""

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; at the first and at each mark, compare what this job and those before it have logged."""
        super().write(record)
        mark = record["step"] * MARKS // (self._compared.steps or 1)
        if mark > self._mark and (Metric.TRAIN_LOSS in record or self._mark < 0):
            self._mark = mark
            compared = compare(self._directory, self._compared, run_curves(read_metrics(self._directory)))
            news = compared.side or str(compared.line)
            if news != self._news or (compared.side and mark == MARKS):
                self._news = news
                line = compared.line if isinstance(compared.line, Notice) else progress(compared.line)
                show(progress(f"step {record['step']:,}: {compared.line}") if compared.side else line)


class BandComparison(NamedTuple):
    """Where a run's training loss is, next to the band of its reference."""

    line: str | Notice  # with the step since when, or why it is not compared
    side: Literal["inside", "above", "below"] | None = None  # None: not compared, or not yet


def compare(directory: Path, record: RunRecord, curves: Mapping[str, Curve]) -> BandComparison:
    """Compare a run's training loss with the band of its reference."""
    path, now = directory / REFERENCE, recipe_of(record)
    try:
        reference = structured(read_json(path), Reference, unknown_keys=True)
        keys = [item for section in KEYS.values() for item in section.items()]
        theirs = {key: field.default for key, field in keys if field.default is not attrs.NOTHING} | reference.recipe
        texts = [(key, json.dumps(value), json.dumps(theirs.get(key))) for key, value in now.items()]
        problems = [f"{key} is {own}, there {other}" for key, own, other in texts if own != other]
        prepared = None if reference.prepared is None else _without_hub(reference.prepared)
        if not {*tokens_of(record)} & {*reference.tokens, prepared} - {None}:
            problems.append("no reference for these tokens")
        if problems:
            more = [f"and {len(problems) - NAMED} more"] if len(problems) > NAMED else []
            raise ValueError("; ".join(problems[:NAMED] + more))
    except (BadInput, ValueError) as error:
        problem = replace(error.problems[0], where="") if isinstance(error, BadInput) else error  # which names the file
        return BandComparison(note(f"{path}: the loss is not compared: {problem}"))
    steps = record.steps or 1
    losses = tenths(curves.get(Metric.TRAIN_LOSS, NO_LOSS), steps)
    if not len(losses):
        devices = ", ".join(reference.devices)
        return BandComparison(f"band         of {len(reference.losses)} runs on {devices}: {path}")
    low, high = np.array(reference.band)[:, : len(losses)]
    sides = (losses > high) * 1 - (losses < low)
    first = int(np.max(np.flatnonzero(sides != sides[-1]), initial=-1)) + 1  # mark
    since = f" since step {-(-(first + 1) * steps // MARKS):,}" if first else ""
    names: tuple[Literal["inside", "above", "below"], ...] = ("inside", "above", "below")
    side = names[sides[-1]]  # 0, 1 or -1
    words = f"training loss {side} the band of {len(reference.losses)} runs of this recipe{since}"
    return BandComparison(words, side)


def recipe_of(record: RunRecord) -> dict[str, Any]:
    """Return the settings on which a run's training loss depends, but for seed and tokens."""
    sections, origin = recipe(record.model, record.train), record.initial_weights
    keys = sections["model"] | sections["train"] | {"log_interval": record.train.log_interval}
    keys |= {"global_batch_size": record.global_batch_size, "initial_weights": origin and origin.sha256}
    return {key: value for key, value in keys.items() if key != "dataset" or not isinstance(value, str)}


def tokens_of(record: RunRecord) -> tuple[str | None, str | None]:
    """Return the identity of a run's tokens, and their sources and tokenizer; None where not known. Raises BadInput.

    Manifests of earlier versions have no hf: in front of a dataset that was named without it, so it is left out.
    """
    files = [stream.sha256 for stream in record.train_streams]
    content = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16] if files and all(files) else None
    manifests = [manifest_of(stream) for stream in record.train_streams]
    names = [f"{', '.join(one.name for one in each.sources)} as {each.tokenizer.name}" for each in manifests if each]
    return content, _without_hub(" + ".join(names)) if len(names) == len(manifests) else None


def _without_hub(prepared: str) -> str:
    """Return sources and tokenizer, as `tokens_of` joins them, with OWNER/NAME for hf:OWNER/NAME; URLs are kept."""
    return re.sub(rf"(^|, | \+ ){HUB}(?!//)", r"\1", prepared)


def tenths(curve: Curve, steps: int) -> np.ndarray:
    """Return the mean finite loss over the tenth before each mark reached, by the trapezoidal rule, float64 (m,)."""
    known = np.isfinite(curve.values)
    share, losses = np.append(0.0, curve.steps[known] / steps), curve.values[known]
    ends = np.arange(1, int(np.max(curve.steps[known], initial=0) * MARKS // steps) + 1) / MARKS
    starts, losses = np.maximum(ends - TENTH / MARKS, 0), np.append(losses[:1], losses)
    area = np.append(0.0, np.cumsum(np.diff(share) * (losses[1:] + losses[:-1]) / 2))
    return (np.interp(ends, share, area) - np.interp(starts, share, area)) / (ends - starts)
