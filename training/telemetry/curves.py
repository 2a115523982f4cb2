"""Curves of a run over its steps, from the records of `metrics.jsonl`."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from training.telemetry.metrics_log import Metric

GIB = 1 << 30


@attrs.frozen(kw_only=True)
class CurvePanel:
    """A chart below the chart of losses, in the report of a run and, if `in_image`, in training-run-chart.png."""

    metric: str
    title: str
    factor: float = 1.0  # values of the metric are multiplied by this factor
    logarithmic: bool = False  # use a logarithmic axis, provided that all values are positive
    in_image: bool = False


PANELS = (
    CurvePanel(metric=Metric.LEARNING_RATE, title="learning rate", in_image=True),
    CurvePanel(metric=Metric.GRAD_NORM, title="gradient norm, before clipping", logarithmic=True, in_image=True),
    CurvePanel(metric=Metric.TOKENS_PER_SECOND, title="tokens/s, whole job"),
    CurvePanel(metric=Metric.MFU, title="MFU, %", factor=100.0),
    CurvePanel(metric=Metric.PEAK_MEMORY_BYTES, title="peak memory of a rank, GiB", factor=1 / GIB),
)
LOGGED = (Metric.TRAIN_LOSS, *(panel.metric for panel in PANELS))
LOSSES = (Metric.TRAIN_LOSS, Metric.VALIDATION_LOSS)
TRAIN, VALIDATION = "training loss", "validation loss"
AVERAGED_SHARE = 0.02  # width of the moving average, as a share of the number of values


@attrs.frozen(eq=False)
class Curve:
    """Values at steps, both float64 (n,). A missing value is NaN."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def known(self) -> np.ndarray:
        """The finite values."""
        return self.values[np.isfinite(self.values)]

    def smoothed(self) -> np.ndarray:
        """Return a centered moving average of the finite values, with NaN where a value is not finite.

        Near the ends of the curve, the average covers only the values that exist.
        """
        finite = np.isfinite(self.values)
        count = int(finite.sum())
        reach = max(1, round(count * AVERAGED_SHARE / 2))
        first = np.maximum(np.arange(count) - reach, 0)
        after = np.minimum(np.arange(count) + reach + 1, count)
        sums = np.concatenate([[0.0], np.cumsum(self.known)])
        values = np.full(len(self.values), np.nan)
        values[finite] = (sums[after] - sums[first]) / (after - first)
        return values


def run_curves(records: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the curves that have finite values: LOGGED metrics, the validation loss, losses on further datasets."""
    logged = [record for record in records if Metric.TRAIN_LOSS in record]
    validated = [record for record in records if Metric.VALIDATION_LOSS in record]
    curves = {name: curve_of(logged, name) for name in LOGGED}
    curves[Metric.VALIDATION_LOSS] = curve_of(validated, Metric.VALIDATION_LOSS)
    datasets = list(dict.fromkeys(key for record in validated for key in record.get(Metric.VALIDATION_LOSSES, {})))
    for dataset in datasets[1:]:
        flat_records = [{**record, **record.get(Metric.VALIDATION_LOSSES, {})} for record in validated]
        curves[dataset] = curve_of([record for record in flat_records if dataset in record], dataset)
    return {name: curve for name, curve in curves.items() if len(curve.known)}


def curve_of(records: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """Return the curve of a key from records with a step. If a record has no value, the key is missing or None."""
    values = [record.get(key) for record in records]  # None becomes NaN
    return Curve(np.array([record["step"] for record in records], np.float64), np.array(values, np.float64))


def losses(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the curves that are losses, by name. The losses on further datasets of a mixture come last."""
    names = {Metric.TRAIN_LOSS: TRAIN, Metric.VALIDATION_LOSS: VALIDATION}
    further = {name: name for name in curves if name not in (*LOGGED, *names)}
    return {name: curves[key] for key, name in (names | further).items() if key in curves}
