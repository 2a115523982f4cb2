"""Curves of one run, or of several over each other, along each axis that all of them know."""

from collections.abc import Sequence

import attrs
import numpy as np

from common.line_chart import Line, LineChart, VerticalMark
from reporting.curve_statistics import common_top, smoothed
from reporting.run_history import AXES, LOGGED, Curve, RunHistory
from reporting.section import COLOURS

GIB = 2.0**30
MOST_COLUMNS = 500  # of a line
COLUMNS = 2000  # of one curve of all runs: the page is to stay below 3 MB
SHORT_HOURS = 1.0  # below, the axis shows minutes
MARK_COLUMNS = 100  # at most one mark of a kind in each
MOST_RAW = 2  # runs whose losses are drawn beside their moving average
LOGARITHMIC_FACTOR = 10.0  # between the greatest values of runs, from which on they share no linear axis
TRAIN, VALIDATION, LOSS = "training loss", "validation loss", "loss, nats per token"
WEIGHTS = "thick: moving average; thin: as logged"
PANEL_COLOUR = 2  # of a single run's curves that are no losses


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
    unit: str  # as the charts name it
    charts: list[str]  # HTML


@attrs.frozen
class LegendEntry:
    """A colour, or a weight of lines, and its meaning."""

    style: str  # CSS class; "" for a weight of lines
    text: str


def charted_axes(histories: Sequence[RunHistory]) -> list[ChartedAxis]:
    """Return the charts along each axis that all runs know."""
    known = [axis for axis in AXES if all(axis in history.axes for history in histories)]
    return [_charted(histories, axis) for axis in known]


def legend(histories: Sequence[RunHistory]) -> list[LegendEntry]:
    """Return the meaning of the colours, runs or the losses of one, and of thick and thin lines."""
    single = len(histories) == 1
    names = [name for name, _ in _losses(histories[0])] if single else [history.name for history in histories]
    entries = [LegendEntry(f"s{number % COLOURS}", name) for number, name in enumerate(names)]
    return entries + ([LegendEntry("", WEIGHTS)] if len(histories) <= MOST_RAW else [])


def _charted(histories: Sequence[RunHistory], axis: str) -> ChartedAxis:
    unit, factor = axis, 1.0
    if axis == "hours" and max(history.axes[axis].last for history in histories) < SHORT_HOURS:
        unit, factor = "minutes", 60.0
    view = _View(histories=histories, axis=axis, unit=unit, factor=factor)
    charts = (
        [view.losses()]
        if len(histories) == 1
        else [*view.loss("train_loss", TRAIN), *view.loss("validation_loss", VALIDATION)]
    )
    charts += [view.panel(panel) for panel in PANELS]
    return ChartedAxis(axis, unit, [chart.svg() for chart in charts if chart.lines])


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
            lines += self._lines(history, curve, name, number % COLOURS, "both" if name == TRAIN else "dotted")
        return self._chart(LOSS, lines, top=common_top([curve for _, curve in losses], losses=True, runs=False))

    def loss(self, key: str, title: str) -> list[LineChart]:
        """Return one loss of several runs: of different tokenizers in bits per byte, or else in a chart for each."""
        known, tokenizers = self._known(key), [_tokenizer(history) for history in self.histories]
        if len({one for one in tokenizers if one is not None}) < 2:
            return [self._loss(known, key, f"{title}, nats per token")]
        factors = [history.bits_per_nat for history in self.histories]
        if None not in factors:
            known = {at: Curve(curve.steps, curve.values * factors[at]) for at, curve in known.items()}
            return [self._loss(known, key, f"{title}, bits per byte of text (the tokenizers differ)")]
        charts = []
        for tokenizer in dict.fromkeys(tokenizers):
            of_it = {at: curve for at, curve in known.items() if tokenizers[at] == tokenizer}
            name = f"nats per token of {tokenizer or 'an unknown tokenizer'} (not comparable with other tokenizers')"
            charts.append(self._loss(of_it, key, f"{title}, {name}"))
        return charts

    def _loss(self, known: dict[int, Curve], key: str, title: str) -> LineChart:
        averaged = "both" if len(self.histories) <= MOST_RAW else "average"
        shape = averaged if key == "train_loss" else "dotted"
        lines = [
            line
            for number, curve in known.items()
            for line in self._lines(self.histories[number], curve, self.histories[number].name, number, shape)
        ]
        top = common_top(list(known.values()), losses=True, runs=True)
        return self._chart(_averaged_title(title, shape), lines, top=top)

    def panel(self, panel: CurvePanel) -> LineChart:
        """Return another curve of all runs."""
        known = {n: Curve(curve.steps, curve.values * panel.scale) for n, curve in self._known(panel.curve).items()}
        single = len(self.histories) == 1
        shape = ("both" if single else "average") if panel.averaged else "plain"
        lines: list[Line] = []
        for number, curve in known.items():
            history = self.histories[number]
            name, colour = (panel.title, PANEL_COLOUR) if single else (history.name, number)
            lines += self._lines(history, curve, name, colour, shape)
        tops = [float(np.nanmax(curve.values)) for curve in known.values()]
        logarithmic = panel.logarithmic or (bool(tops) and max(tops) > LOGARITHMIC_FACTOR * min(tops) > 0)
        top = None if logarithmic else common_top(list(known.values()), losses=False, runs=False)
        return self._chart(_averaged_title(panel.title, shape), lines, top=top, logarithmic=logarithmic)

    def _known(self, key: str) -> dict[int, Curve]:
        """Return a curve of those runs that have it, by the number of the run."""
        return {number: history.curves[key] for number, history in enumerate(self.histories) if key in history.curves}

    def _chart(self, title: str, lines: list[Line], *, top: float | None, logarithmic: bool = False) -> LineChart:
        columns = min(MOST_COLUMNS, COLUMNS // len(self.histories))
        return LineChart(
            title=title,
            axis=self.unit,
            lines=lines,
            columns=columns,
            marks=self._marks(),
            logarithmic=logarithmic,
            top=top,
        )

    def _lines(self, history: RunHistory, curve: Curve, name: str, colour: int, shape: str) -> list[Line]:
        """Return a curve as it is ("plain", "dotted"), or its moving average ("average"), or "both"."""
        line = Line(name=name, x=self._x(history, curve), y=curve.values, colour=f"s{colour}", dotted=shape == "dotted")
        if shape in ("plain", "dotted"):
            return [line]
        average = attrs.evolve(line, y=smoothed(curve), weight="bold")
        if shape == "average":
            return [average]
        return [
            attrs.evolve(line, name=f"{name}, as logged", weight="raw"),
            attrs.evolve(average, name=f"{name}, average"),
        ]

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


def _tokenizer(history: RunHistory) -> str | None:
    found = history.record.tokenizer
    return None if found is None else f"{found.name} ({found.vocabulary_size:,} ids)"


def _averaged_title(title: str, shape: str) -> str:
    return f"{title}, moving average" if shape == "average" else title


def _tip(step: int, kind: str, text: str) -> str:
    return f"step {step:,}: {kind}" + (f", {text}" if text else "")


def _losses(history: RunHistory) -> list[tuple[str, Curve]]:
    """Return the losses of a run by name, those of a mixture's further datasets last, in the order of the colours."""
    names = {"train_loss": TRAIN, "validation_loss": VALIDATION}
    further = {name: name for name in history.curves if name not in (*LOGGED, *names)}
    return [(name, history.curves[key]) for key, name in (names | further).items() if key in history.curves]
