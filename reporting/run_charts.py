"""Curves of one run, or of several over each other, along each axis that all of them know."""

from collections.abc import Sequence

import attrs
import numpy as np

from reporting.line_chart import Line, LineChart, VerticalMark
from reporting.run_history import AXES, LOGGED, Curve, RunHistory
from reporting.section import COLOURS

GIB = 2.0**30
AVERAGED_SHARE = 0.02  # width of the moving average, as a share of the logged steps
EARLY_SHARE = 0.05  # of a run: losses of its first steps may lie above the chart
SHORT_HOURS = 1.0  # below, the axis shows minutes
MARK_COLUMNS = 100  # at most one mark of a kind in each
MOST_RAW = 2  # runs whose values are drawn beside their moving average
TRAIN, VALIDATION = "training loss", "validation loss"


@attrs.frozen(kw_only=True)
class CurvePanel:
    """One chart of the page, for each axis."""

    title: str
    curve: str  # of a history
    logarithmic: bool = False
    scale: float = 1.0  # of the values shown
    averaged: bool = False  # a noisy one


PANELS = (
    CurvePanel(title="learning rate", curve="learning_rate"),
    CurvePanel(title="gradient norm, before clipping", curve="grad_norm", logarithmic=True, averaged=True),
    CurvePanel(title="tokens/s, whole job", curve="tokens_per_second", averaged=True),
    CurvePanel(title="MFU, %", curve="mfu", scale=100.0, averaged=True),
    CurvePanel(title="peak memory of a rank, GiB", curve="peak_memory_bytes", scale=1 / GIB),
)


@attrs.frozen
class ChartedAxis:
    """All charts along one axis."""

    name: str
    charts: list[str]  # HTML


@attrs.frozen
class LegendEntry:
    """A colour and its meaning."""

    style: str
    text: str


def charted_axes(histories: Sequence[RunHistory]) -> list[ChartedAxis]:
    """Return the charts along each axis that all runs know."""
    known = [axis for axis in AXES if all(axis in history.axes for history in histories)]
    return [ChartedAxis(axis, _charts(histories, axis)) for axis in known]


def legend(histories: Sequence[RunHistory]) -> list[LegendEntry]:
    """Return the meaning of the colours: of runs, or of the curves of one."""
    if len(histories) > 1:
        return [LegendEntry(f"s{number}", history.name) for number, history in enumerate(histories)]
    return [LegendEntry(f"s{number % COLOURS}", name) for number, (name, _) in enumerate(_losses(histories[0]))]


def _charts(histories: Sequence[RunHistory], axis: str) -> list[str]:
    unit, factor = axis, 1.0
    if axis == "hours" and max(history.axes[axis].last for history in histories) < SHORT_HOURS:
        unit, factor = "minutes", 60.0
    view = _View(histories=histories, axis=axis, unit=unit, factor=factor)
    charts = (
        [view.losses()]
        if len(histories) == 1
        else [view.loss("train_loss", TRAIN), view.loss("validation_loss", VALIDATION)]
    )
    charts += [view.panel(panel) for panel in PANELS]
    return [chart.svg() for chart in charts if chart.lines]


@attrs.frozen(kw_only=True)
class _View:
    """Runs along one axis."""

    histories: Sequence[RunHistory]
    axis: str
    unit: str
    factor: float

    def losses(self) -> LineChart:
        """Return training and validation loss of a single run."""
        history = self.histories[0]
        lines: list[Line] = []
        losses = _losses(history)
        for number, (name, curve) in enumerate(losses):
            style = f"s{number % COLOURS}"
            if name == TRAIN:
                lines += self._lines(history, curve, name, style, "both")
            else:  # few points: a line, and dots
                [line] = self._lines(history, curve, name, style, "plain")
                lines += [line, attrs.evolve(line, style=f"{style} dots")]
        return self._chart("loss, nats per token", lines, [curve for _, curve in losses])

    def loss(self, key: str, title: str) -> LineChart:
        """Return one loss of several runs."""
        lines: list[Line] = []
        curves: list[Curve] = []
        for number, history in enumerate(self.histories):
            if (curve := history.curves.get(key)) is not None:
                averaged = "both" if len(self.histories) <= MOST_RAW else "smooth"
                shape = averaged if key == "train_loss" else "plain"
                lines += self._lines(history, curve, history.name, f"s{number}", shape)
                curves.append(curve)
        return self._chart(f"{title}, nats per token", lines, curves)

    def panel(self, panel: CurvePanel) -> LineChart:
        """Return another curve of all runs."""
        lines = []
        for number, history in enumerate(self.histories):
            if (curve := history.curves.get(panel.curve)) is not None:
                scaled = Curve(curve.steps, curve.values * panel.scale)
                name = history.name if len(self.histories) > 1 else panel.title
                style = f"s{number}" if len(self.histories) > 1 else "s2"
                both = "both" if len(self.histories) == 1 else "smooth"
                lines += self._lines(history, scaled, name, style, both if panel.averaged else "plain")
        marks = self._marks()
        return LineChart(title=panel.title, axis=self.unit, lines=lines, marks=marks, logarithmic=panel.logarithmic)

    def _chart(self, title: str, lines: list[Line], curves: list[Curve]) -> LineChart:
        top = max(map(_top, curves), default=None)
        above = top is not None and any((_early(curve) > top).any() for curve in curves)
        title += " (the first steps lie above)" if above else ""
        return LineChart(title=title, axis=self.unit, lines=lines, marks=self._marks(), top=top if above else None)

    def _lines(self, history: RunHistory, curve: Curve, name: str, style: str, shape: str) -> list[Line]:
        """Return a curve as it is ("plain"), or its moving average ("smooth"), or this before its values ("both")."""
        x = self._x(history, curve)
        if shape == "plain":
            return [Line(name=name, x=x, y=curve.values, style=style)]
        values = Line(name=f"{name}, as logged", x=x, y=curve.values, style=f"{style} raw")
        average = Line(name=name, x=x, y=_smoothed(curve), style=f"{style} bold")
        return [values, average] if shape == "both" else [average]

    def _x(self, history: RunHistory, curve: Curve) -> np.ndarray:
        return history.along(self.axis, curve) * self.factor

    def _marks(self) -> list[VerticalMark]:
        """Return the events of a single run; those of several would hide the curves."""
        if len(self.histories) > 1:
            return []
        history = self.histories[0]
        places = history.along(self.axis, Curve(np.array([mark.step for mark in history.marks], float), np.zeros(0)))
        width = max(1e-9, history.axes[self.axis].last) / MARK_COLUMNS
        marks = {
            (mark.kind, int(place / width)): VerticalMark(
                x=float(place) * self.factor,
                style=mark.kind.replace(" ", "-"),
                text=_tip(mark.step, mark.kind, mark.text),
            )
            for place, mark in zip(places, history.marks, strict=True)
        }
        return list(marks.values())


def _tip(step: int, kind: str, text: str) -> str:
    return f"step {step:,}: {kind}" + (f", {text}" if text else "")


def _losses(history: RunHistory) -> list[tuple[str, Curve]]:
    """Return the losses of a run by name, those of a mixture's further datasets last, in the order of the colours."""
    names = {"train_loss": TRAIN, "validation_loss": VALIDATION}
    further = {name: name for name in history.curves if name not in (*LOGGED, *names)}
    return [(name, history.curves[key]) for key, name in (names | further).items() if key in history.curves]


def _smoothed(curve: Curve) -> np.ndarray:
    """Return the moving average of the known values around each, NaN at the others; at the ends over what is there."""
    known = np.isfinite(curve.values)
    count = int(known.sum())
    reach = max(1, round(count * AVERAGED_SHARE / 2))
    first = np.maximum(np.arange(count) - reach, 0)
    after = np.minimum(np.arange(count) + reach + 1, count)
    sums = np.concatenate([[0.0], np.cumsum(curve.values[known])])
    values = np.full(len(curve.values), np.nan)
    values[known] = (sums[after] - sums[first]) / (after - first)
    return values


def _top(curve: Curve) -> float:
    """Return the largest value after the first steps."""
    later = curve.values[(curve.steps >= EARLY_SHARE * curve.steps[-1]) & np.isfinite(curve.values)]
    return float(later.max()) if len(later) else float(np.nanmax(curve.values))


def _early(curve: Curve) -> np.ndarray:
    """Return the known values of the first steps."""
    return curve.values[(curve.steps < EARLY_SHARE * curve.steps[-1]) & np.isfinite(curve.values)]
