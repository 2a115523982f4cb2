"""Curves of a run over its steps, from the records of `metrics.jsonl`."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

LOGGED = ("train_loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "peak_memory_bytes")
TRAIN, VALIDATION = "training loss", "validation loss"
AVERAGED_SHARE = 0.02  # width of the moving average, as a share of the known values


@attrs.frozen(eq=False)
class Curve:
    """Values over steps, both float64 (n,); an unknown value is NaN."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def known(self) -> np.ndarray:
        return self.values[np.isfinite(self.values)]

    def smoothed(self) -> np.ndarray:
        """Return the moving average of the known values around each, NaN at the others; at the ends of those there."""
        known = np.isfinite(self.values)
        count = int(known.sum())
        reach = max(1, round(count * AVERAGED_SHARE / 2))
        first = np.maximum(np.arange(count) - reach, 0)
        after = np.minimum(np.arange(count) + reach + 1, count)
        sums = np.concatenate([[0.0], np.cumsum(self.known)])
        values = np.full(len(self.values), np.nan)
        values[known] = (sums[after] - sums[first]) / (after - first)
        return values


def run_curves(records: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the curves that have a value: those of LOGGED, "validation_loss", and those of further datasets."""
    logged = [record for record in records if "train_loss" in record]
    validated = [record for record in records if "validation_loss" in record]
    found = {name: curve_of(logged, name) for name in LOGGED}
    found["validation_loss"] = curve_of(validated, "validation_loss")
    for dataset in list(dict.fromkeys(key for record in validated for key in record.get("validation_losses", {})))[1:]:
        measured = [{**record, **record.get("validation_losses", {})} for record in validated]
        found[dataset] = curve_of([record for record in measured if dataset in record], dataset)
    return {name: curve for name, curve in found.items() if len(curve.known)}


def curve_of(records: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """Return the values of a key, of records with a step; null where unknown."""
    values = [record.get(key) for record in records]  # None becomes NaN
    return Curve(np.array([record["step"] for record in records], np.float64), np.array(values, np.float64))


def losses(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the losses among curves by name, those of a mixture's further datasets last."""
    names = {"train_loss": TRAIN, "validation_loss": VALIDATION}
    further = {name: name for name in curves if name not in (*LOGGED, *names)}
    return {name: curves[key] for key, name in (names | further).items() if key in curves}
