"""Curves of one run, or of several over each other, along each axis that all of them know."""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from common.line_chart import PALETTE, Line, LineChart, VerticalMark
from reporting.run_history import AXES, RunHistory
from training.config.train_config import recipe
from training.telemetry.curves import LOSSES, PANELS, TRAIN, VALIDATION, Curve, losses
from training.telemetry.metrics_log import Metric

MOST_COLUMNS = 500  # of a line
COLUMNS = 2000  # of one curve of all runs: the page is to stay below 3 MB
SHORT_HOURS = 1.0  # below, the axis shows minutes
MARK_COLUMNS = 100  # at most one mark of a kind in each
MOST_RAW = 2  # runs whose losses are drawn beside their moving average
LOGARITHMIC_FACTOR = 10.0  # between the greatest values of runs, from which on they share no linear axis
WEIGHTS = "thick: moving average; thin: as logged"
PANEL_COLOUR = 2  # of a single run's curves that are no losses
NOISY = (Metric.TRAIN_LOSS, Metric.GRAD_NORM, Metric.TOKENS_PER_SECOND, Metric.MFU)  # drawn as moving averages

EARLY_SHARE = 0.05  # of a run: losses of its first steps may lie above the chart
ORDINARY_SHARE = 0.98  # of the values; a higher one is a spike where it is far above them all
FEWEST_VALUES = 10  # below, all are shown
BEARABLE_RANGES = 1.5  # of the ordinary values, up to which higher ones are shown as well
BEARABLE_FACTOR = 2.0  # likewise, of the highest ordinary value that is no loss
SHOWN_SHARE = 0.25  # of the values of each run, at least, are shown
OUTLYING_FACTOR = 5.0  # between the highest values of an ordinary run and of one that lies outside


def charted_axes(histories: Sequence[RunHistory]) -> "list[ChartedAxis]":
    """Return the charts along each axis that all runs know."""
    colours = {at: colour for colour, (_, members) in enumerate(grouped(histories)) for at in members}
    axes = []
    for axis in (axis for axis in AXES if all(axis in history.axes for history in histories)):
        minutes = axis == "hours" and max(history.axes[axis].last for history in histories) < SHORT_HOURS
        unit, factor = ("minutes", 60) if minutes else (axis, 1)
        axes.append(ChartedAxis(histories=histories, name=axis, unit=unit, factor=factor, colours=colours))
    return axes


def legend(histories: Sequence[RunHistory]) -> list[tuple[str, str]]:
    """Return (CSS class, meaning) of the colours, runs or the losses of one, and of thick and thin lines."""
    names = list(losses(histories[0].curves)) if len(histories) == 1 else [name for name, _ in grouped(histories)]
    entries = [(f"s{number % len(PALETTE)}", name) for number, name in enumerate(names)]
    return entries + ([("", WEIGHTS)] if len(histories) <= MOST_RAW else [])


def grouped(histories: Sequence[RunHistory]) -> list[tuple[str, list[int]]]:
    """Return the runs that share a colour, by their numbers, and a name for them: up to eight runs, each one.

    Of more, those of one recipe, which differ in their seeds; then the best seven recipes by loss, and all others.
    """
    if len(histories) <= len(PALETTE):
        return [(history.name, [at]) for at, history in enumerate(histories)]
    recipes: dict[str, list[int]] = {}
    last = [([curve.last for curve in losses(one.curves).values()][:2] or [np.nan])[-1] for one in histories]
    for at in np.argsort(last, kind="stable").tolist():
        key = str(recipe(histories[at].model, histories[at].train))
        recipes.setdefault(key, []).append(at)
    groups = [(histories[members[0]].name.partition("-seed-")[0], members) for members in recipes.values()]
    rest = [at for _, members in groups[len(PALETTE) - 1 :] for at in members]
    return groups if len(groups) <= len(PALETTE) else [*groups[: len(PALETTE) - 1], (f"{len(rest)} others", rest)]


def common_top(curves: Sequence[Curve], *, losses: bool) -> float:
    """Return the largest value to show, infinite: all. Spikes, outlying runs and the first `losses` may lie outside.

    No run is hidden: a quarter of its values or more is shown, whatever the number of runs. Of two runs, for example,
    neither is the ordinary one.
    """
    early = EARLY_SHARE if losses else 0.0
    later = [curve.values[(curve.steps >= early * curve.steps[-1]) & np.isfinite(curve.values)] for curve in curves]
    later = [values if len(values) else curve.known for values, curve in zip(later, curves, strict=True)]
    if sum(map(len, later)) < FEWEST_VALUES:
        return np.inf
    tops = [float(np.quantile(values, ORDINARY_SHARE, method="lower")) for values in later]
    most = OUTLYING_FACTOR * sorted(tops)[(len(tops) - 1) // 2]
    limit = -np.inf
    chosen = [top <= most or most <= 0 for top in tops]
    lowest = [float(np.quantile(values, SHOWN_SHARE, method="lower")) for values in later]
    while True:
        ordinary = np.concatenate([values for values, one in zip(later, chosen, strict=True) if one])
        low, high = float(ordinary.min()), float(np.quantile(ordinary, ORDINARY_SHARE, method="lower"))
        limit = max(limit, low + BEARABLE_RANGES * (high - low), -np.inf if losses else BEARABLE_FACTOR * high)
        hidden = [at for at, value in enumerate(lowest) if value > limit]
        if not hidden:
            break
        for at in hidden:  # all of its ordinary values; of a run that diverged, those before it did
            diverged = tops[at] > OUTLYING_FACTOR * lowest[at] > 0
            limit = max(limit, lowest[at] if diverged else tops[at])
            chosen[at] = chosen[at] or not diverged
    every = np.concatenate([curve.known for curve in curves])
    return np.inf if every.max() <= limit else float(every[every <= limit].max())


@attrs.frozen(kw_only=True)
class ChartedAxis:
    histories: Sequence[RunHistory]
    name: str
    unit: str  # as the charts name it
    factor: float
    colours: dict[int, int]  # by the number of the run

    @property
    def charts(self) -> list[str]:
        """Charts along the axis as HTML."""
        return [chart.svg() for chart in self._charts() if chart.lines]

    def _charts(self) -> Iterator[LineChart]:
        """Yield the charts of losses, then the others; one without lines where no run has the curve."""
        if len(self.histories) == 1:
            found = losses(self.histories[0].curves)
            lines = []
            for number, (name, curve) in enumerate(found.items()):
                key = Metric.TRAIN_LOSS if name == TRAIN else Metric.VALIDATION_LOSS
                lines += self._lines(0, key, curve, name, number % len(PALETTE))
            yield self._line_chart("loss, nats per token", lines, common_top([*found.values()], losses=True))
        else:
            yield from self._losses(Metric.TRAIN_LOSS, TRAIN)
            yield from self._losses(Metric.VALIDATION_LOSS, VALIDATION)
        for panel in PANELS:
            known = {
                at: Curve(curve.steps, curve.values * panel.factor) for at, curve in self._known(panel.metric).items()
            }
            tops = [float(curve.known.max()) for curve in known.values()]
            uneven = bool(tops) and max(tops) > LOGARITHMIC_FACTOR * min(tops)
            # A run without a positive value would have no place on a logarithmic axis.
            positive = bool(tops) and min(tops) > 0
            logarithmic = positive and (uneven or panel.logarithmic)
            yield self._chart(panel.title, panel.metric, known, logarithmic=logarithmic)

    def _losses(self, key: str, title: str) -> Iterator[LineChart]:
        """Yield one loss of several runs: of different tokenizers in bits per byte, or else in a chart for each."""
        known, own = self._known(key), [history.job.tokenizer for history in self.histories]
        tokenizers = [None if one is None else f"{one.name} ({one.vocabulary_size:,} ids)" for one in own]
        factors = [history.bits_per_nat for history in self.histories]
        if len({one for one in tokenizers if one is not None}) < 2:
            yield self._chart(f"{title}, nats per token", key, known)
        elif None not in factors:
            known = {at: Curve(curve.steps, curve.values * factors[at]) for at, curve in known.items()}
            yield self._chart(f"{title}, bits per byte of text (the tokenizers differ)", key, known)
        else:
            for tokenizer in dict.fromkeys(tokenizers):
                of_it = {at: curve for at, curve in known.items() if tokenizers[at] == tokenizer}
                name = f"{tokenizer or 'an unknown tokenizer'} (not comparable with other tokenizers')"
                yield self._chart(f"{title}, nats per token of {name}", key, of_it)

    def _chart(self, title: str, key: str, known: dict[int, Curve], *, logarithmic: bool = False) -> LineChart:
        """Return a chart of a curve of each run, given by the number of the run."""
        lines: list[Line] = []
        for number, curve in known.items():
            several = self.histories[number].name, self.colours[number]
            lines += self._lines(number, key, curve, *(several if len(self.histories) > 1 else (title, PANEL_COLOUR)))
        drawn = [*known.values()]
        if key in NOISY and not self._shows_raw(key):
            drawn = [Curve(curve.steps, curve.smoothed()) for curve in drawn]
        top = np.inf if logarithmic or not drawn else common_top(drawn, losses=key in LOSSES)
        averages = "" if key not in NOISY or self._shows_raw(key) else ", moving average"
        return self._line_chart(title + averages, lines, top, logarithmic=logarithmic)

    def _known(self, key: str) -> dict[int, Curve]:
        """Return a curve of those runs that have it, by the number of the run."""
        return {number: history.curves[key] for number, history in enumerate(self.histories) if key in history.curves}

    def _line_chart(self, title: str, lines: list[Line], top: float, *, logarithmic: bool = False) -> LineChart:
        columns = min(MOST_COLUMNS, COLUMNS // len(self.histories))
        marks = self._marks()
        return LineChart(
            title=title, axis=self.unit, lines=lines, columns=columns, marks=marks, logarithmic=logarithmic, top=top
        )

    def _shows_raw(self, key: str) -> bool:
        return len(self.histories) <= (MOST_RAW if key in LOSSES else 1)

    def _lines(self, number: int, key: str, curve: Curve, name: str, colour: int) -> list[Line]:
        """Return a run's curve as it is, and its moving average or both where it is noisy."""
        x = self.histories[number].along(self.name, curve.steps) * self.factor
        line = Line(name=name, x=x, y=curve.values, colour=colour, dotted=key == Metric.VALIDATION_LOSS)
        if key not in NOISY:
            return [line]
        average = attrs.evolve(line, y=curve.smoothed(), weight="bold" if len(self.histories) <= len(PALETTE) else "")
        if not self._shows_raw(key):
            return [average]
        raw = attrs.evolve(line, name=f"{name}, as logged", weight="raw")
        return [raw, attrs.evolve(average, name=f"{name}, average")]

    def _marks(self) -> list[VerticalMark]:
        """Return the events of a single run; those of several would hide the curves."""
        if len(self.histories) > 1:
            return []
        history = self.histories[0]
        places = history.along(self.name, np.array([mark.step for mark in history.marks], float))
        width = max(1e-9, history.axes[self.name].last) / MARK_COLUMNS
        marks = {}
        for place, mark in zip(places, history.marks, strict=True):
            text = f"step {mark.step:,}: {mark.kind}" + (f", {mark.text}" if mark.text else "")
            style = mark.kind.replace(" ", "-")
            marks[mark.kind, int(place / width)] = VerticalMark(x=float(place) * self.factor, style=style, text=text)
        return list(marks.values())
