"""The reference of a run directory, `reference.json`: losses of finished runs, and the band for a new run.

A run of the same recipe is compared with the band at 40 marks. At each mark, the compared number is the mean of the
run's training loss over the preceding tenth of the run. The band has a lower and an upper bound for each mark; 95 of
100 new runs stay within the bounds at all marks. `report.py RUN... --reference DIR` writes the file.
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

# In the shapes below, M is the number of equally spaced marks and R the number of runs.
MARKS, TENTH = 40, 4  # number of marks in a run, and in a tenth of a run
SHOWN_DIFFERENCES = 3
FEWEST = 3  # minimum number of runs for a reference
ROUNDING_TOLERANCE = 1e-3  # larger than the rounding error of the numbers in a reference
NO_LOSS = Curve(np.zeros(0), np.zeros(0))
_EACH_SEED = ValueCheck(lambda seeds: all(map(integer(0).holds, seeds)), "whole numbers from 0")
_EACH_LOSS = ValueCheck(lambda rows: all(number(0).holds(loss) for row in rows for loss in row), "losses from 0")


@attrs.frozen(kw_only=True)
class Reference:
    """Losses of R runs of the same recipe, and the band for a new run.

    All losses are means over a tenth of a run, in nats per token.
    """

    recipe: dict[str, Any]
    # Sources and tokenizer. A run can be compared if its tokens were prepared from these sources with this tokenizer.
    # None: a run can be compared only if its tokens are among `tokens`.
    prepared: str | None
    devices: list[str]
    band: list[list[float]]  # lowest and highest loss, (2, M); the lowest may be below zero
    seeds: list[int] = attrs.field(validator=_EACH_SEED)  # (R,)
    tokens: list[str]  # identity of each run's training tokens, (R,)
    losses: list[list[float]] = attrs.field(validator=_EACH_LOSS)  # (R, M)

    def __attrs_post_init__(self) -> None:
        runs = len(self.losses)
        if runs < FEWEST or not len(self.seeds) == len(self.tokens) == runs:
            counts = f"{runs} losses, {len(self.seeds)} seeds and {len(self.tokens)} tokens"
            raise ValueError(
                f"losses: got {counts}, wanted at least {FEWEST} runs, each with its losses, seed and tokens"
            )
        if len({*zip(self.seeds, self.tokens, strict=True)}) < runs:
            raise ValueError("seeds: got two runs with the same seed and the same tokens, wanted different ones")
        if len(self.band) != 2 or any(len(row) != MARKS for row in (*self.band, *self.losses)):
            raise ValueError(
                f"band, losses: wanted two bounds in the band, and {MARKS} numbers in each bound and for each run"
            )
        if any(low > high for low, high in zip(*self.band, strict=True)):
            raise ValueError("band: wanted the lowest losses first, then the highest")
        low, high = np.array(self.band)
        means = np.mean(self.losses, axis=0)  # the band surrounds the means; both are rounded
        if ((means < low - ROUNDING_TOLERANCE) | (means > high + ROUNDING_TOLERANCE)).any():
            raise ValueError(
                "band: at some mark, the mean of the losses is outside the band, so the band is not from these losses"
            )


class ComparedLog(MetricsLog):
    """Metrics log of a run with a reference.

    It prints a line when the training loss leaves or enters the band, and another line at the end of the run.
    """

    def __init__(self, directory: Path, compared: RunRecord):
        super().__init__(directory)
        self._directory, self._run_record, self._mark, self._last_shown = directory, compared, -1, ""

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. At the first record, and then at each mark, compare the run's losses with the band."""
        super().write(record)
        mark = record["step"] * MARKS // (self._run_record.steps or 1)
        if mark > self._mark and (Metric.TRAIN_LOSS in record or self._mark < 0):
            self._mark = mark
            comparison = compare(self._directory, self._run_record, run_curves(read_metrics(self._directory)))
            summary = comparison.side or str(comparison.line)
            if summary != self._last_shown or (comparison.side and mark == MARKS):
                self._last_shown = summary
                line = comparison.line if isinstance(comparison.line, Notice) else progress(comparison.line)
                show(progress(f"step {record['step']:,}: {comparison.line}") if comparison.side else line)


class BandComparison(NamedTuple):
    """Whether a run's training loss is inside, above or below the band of its reference."""

    line: str | Notice  # the result and the step at which it began to hold, or why the run is not compared
    side: Literal["inside", "above", "below"] | None = None  # None: not compared, or not yet


def compare(directory: Path, record: RunRecord, curves: Mapping[str, Curve]) -> BandComparison:
    """Compare a run's training loss with the band of its reference."""
    path, run_recipe = directory / REFERENCE, recipe_of(record)
    try:
        reference = structured(read_json(path), Reference, unknown_keys=True)
        fields = [field for section in KEYS.values() for field in section.items()]
        defaults = {key: field.default for key, field in fields if field.default is not attrs.NOTHING}
        reference_recipe = defaults | reference.recipe
        texts = [(key, json.dumps(value), json.dumps(reference_recipe.get(key))) for key, value in run_recipe.items()]
        problems = [f"{key} is {here}, but {there} in the reference" for key, here, there in texts if here != there]
        prepared = None if reference.prepared is None else _without_hub(reference.prepared)
        if not {*tokens_of(record)} & {*reference.tokens, prepared} - {None}:
            problems.append("the reference is not for these tokens")
        if problems:
            more = [f"and {len(problems) - SHOWN_DIFFERENCES} more"] if len(problems) > SHOWN_DIFFERENCES else []
            raise ValueError("; ".join(problems[:SHOWN_DIFFERENCES] + more))
    except (BadInput, ValueError) as error:
        # `where` of a BadInput's problem is the file. The line below also names the file, so `where` is removed here.
        problem = replace(error.problems[0], where="") if isinstance(error, BadInput) else error
        return BandComparison(note(f"{path}: the loss is not compared: {problem}"))
    steps = record.steps or 1
    losses = tenths(curves.get(Metric.TRAIN_LOSS, NO_LOSS), steps)
    if not len(losses):
        devices = ", ".join(reference.devices)
        return BandComparison(f"band         of {len(reference.losses)} runs on {devices}: {path}")
    low, high = np.array(reference.band)[:, : len(losses)]
    sides = (losses > high) * 1 - (losses < low)
    # From the mark `first` on, the loss stays on one side.
    first = int(np.max(np.flatnonzero(sides != sides[-1]), initial=-1)) + 1
    since = f" since step {-(-(first + 1) * steps // MARKS):,}" if first else ""
    names: tuple[Literal["inside", "above", "below"], ...] = ("inside", "above", "below")
    side = names[sides[-1]]  # 0, 1 or -1
    words = f"training loss {side} the band of {len(reference.losses)} runs of this recipe{since}"
    return BandComparison(words, side)


def recipe_of(record: RunRecord) -> dict[str, Any]:
    """Return the settings on which a run's training loss depends, except the seed and the tokens."""
    sections, origin = recipe(record.model, record.train), record.initial_weights
    keys = sections["model"] | sections["train"] | {"log_interval": record.train.log_interval}
    keys |= {"global_batch_size": record.global_batch_size, "initial_weights": origin and origin.sha256}
    return {key: value for key, value in keys.items() if key != "dataset" or not isinstance(value, str)}


def tokens_of(record: RunRecord) -> tuple[str | None, str | None]:
    """Return the identity of a run's tokens, and their sources and tokenizer. Either value is None if it is unknown.

    Sources are returned without the prefix hf:. Manifests of earlier versions have it only if the user wrote it.
    Raises BadInput for a damaged manifest.
    """
    files = [stream.sha256 for stream in record.train_streams]
    content = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16] if files and all(files) else None
    manifests = [manifest_of(stream) for stream in record.train_streams]
    names = [
        f"{', '.join(source.name for source in manifest.sources)} as {manifest.tokenizer.name}"
        for manifest in manifests
        if manifest
    ]
    return content, _without_hub(" + ".join(names)) if len(names) == len(manifests) else None


def _without_hub(prepared: str) -> str:
    """Return the sources and tokenizer, joined as in `tokens_of`, with hf:OWNER/NAME replaced by OWNER/NAME.

    URLs do not change.
    """
    return re.sub(rf"(^|, | \+ ){HUB}(?!//)", r"\1", prepared)


def tenths(curve: Curve, steps: int) -> np.ndarray:
    """Return a mean for each mark that the run has reached.

    Each mean covers the finite losses in the tenth of a run before the mark. The means are float64 (m,), and are
    computed by the trapezoidal rule.
    """
    finite = np.isfinite(curve.values)
    share, losses = np.append(0.0, curve.steps[finite] / steps), curve.values[finite]
    ends = np.arange(1, int(np.max(curve.steps[finite], initial=0) * MARKS // steps) + 1) / MARKS
    starts, losses = np.maximum(ends - TENTH / MARKS, 0), np.append(losses[:1], losses)
    area = np.append(0.0, np.cumsum(np.diff(share) * (losses[1:] + losses[:-1]) / 2))
    return (np.interp(ends, share, area) - np.interp(starts, share, area)) / (ends - starts)
