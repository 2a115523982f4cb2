"""Loss band: a training loss beside those of finished runs of its recipe, the reference of a run directory.

Compared is the mean loss over the tenth of the run before each of 40 marks, with bounds that hold it at all marks for
95 of 100 further runs of the recipe. `report.py RUN... --reference DIR` writes the file (training/reference.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from training.telemetry.curves import Curve, run_curves
from training.telemetry.metrics_log import MetricsLog, read_metrics

MARKS = 40  # M, at equal distances
TENTH = 4  # marks in a tenth of the run
TENTH_ENDS = np.arange(1, MARKS + 1) / MARKS  # of the tenths, as shares of the run
TENTH_STARTS = np.maximum(np.arange(1, MARKS + 1) - TENTH, 0) / MARKS


@attrs.frozen(kw_only=True)
class Reference:
    """Losses of R runs of one recipe, and the band for another one's: means over tenths, nats per token."""

    recipe: dict[str, dict[str, Any]]
    prepared: str | None  # sources and tokenizer of any tokens that count; None: those of `tokens` alone
    devices: list[str]
    log_interval: int
    band: list[list[float]]  # lowest and highest loss (2, M)
    seeds: list[int]  # R
    tokens: list[str]  # identity of each run's training tokens (R)
    losses: list[list[float]]  # (R, M)

    def __attrs_post_init__(self) -> None:
        if len(self.band) != 2 or any(len(each) != MARKS for each in (*self.band, *self.losses)):
            raise ValueError(f"band, losses: wanted {MARKS} numbers each, and two bounds")

    def sides(self, curve: Curve, steps: int) -> np.ndarray:
        """Return 1 for each mark reached with a loss above the band, -1 for one below it, else 0."""
        losses = tenths(curve, steps)
        low, high = np.array(self.band)[:, : len(losses)]
        return (losses > high) * 1 - (losses < low)

    def verdict(self, curve: Curve, steps: int) -> str | None:
        """Return where the loss of a run of so many steps is, and since which step; None before the first mark."""
        sides = self.sides(curve, steps)
        if not len(sides):
            return None
        first = int(np.max(np.flatnonzero(sides != sides[-1]), initial=-1)) + 1
        since = f" since step {-(-(first + 1) * steps // MARKS):,}" if first else ""
        side = {0: "inside", 1: "above", -1: "below"}[int(sides[-1])]
        return f"{side} the band of {len(self.losses)} runs of this recipe{since}"


class ComparedLog(MetricsLog):
    """Metrics log that tells when the training loss leaves or enters the band, and where it ends."""

    def __init__(self, directory: Path, say: Callable[[str], None], reference: Reference, first_step: int, steps: int):
        """Open it. What earlier jobs logged up to `first_step`, where this one begins, counts."""
        super().__init__(directory, say)
        found = run_curves([each for each in read_metrics(directory) if each.get("step", 0) <= first_step])
        curve = found.get("train_loss", Curve(np.zeros(0), np.zeros(0)))
        self._logged = list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
        self._reference, self._steps, self._side = reference, steps, "inside"

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; compare the loss at each mark."""
        super().write(record)
        if "train_loss" not in record:
            return
        before, step = self._logged[-1][0] if self._logged else 0, record["step"]
        self._logged.append((step, record["train_loss"]))
        if step * MARKS // self._steps > before * MARKS // self._steps:
            verdict = self._reference.verdict(Curve(*np.array(self._logged, np.float64).T), self._steps)
            if verdict is not None and (not verdict.startswith(self._side) or step == self._steps):
                self._side = verdict.partition(" ")[0]
                self._say(f"step {step:,}: training loss {verdict}")


def tenths(curve: Curve, steps: int) -> np.ndarray:
    """Return the mean loss over the tenth before each mark that a run of so many steps has reached, float64 (m,).

    By the trapezoidal rule over the logged steps; those without a finite loss are left out.
    """
    known = np.isfinite(curve.values)
    share, losses = np.append(0.0, curve.steps[known] / steps), curve.values[known]
    count = int(np.searchsorted(TENTH_ENDS, share[-1], "right"))
    ends, starts, losses = TENTH_ENDS[:count], TENTH_STARTS[:count], np.append(losses[:1], losses)
    area = np.append(0.0, np.cumsum(np.diff(share) * (losses[1:] + losses[:-1]) / 2))
    return (np.interp(ends, share, area) - np.interp(starts, share, area)) / (ends - starts)
