"""Charts of the curves of one or several runs, for each x-axis that all of the runs have recorded."""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from common.line_chart import PALETTE, Line, LineChart, VerticalMark
from reporting.run_history import AXES, RunHistory
from training.config.train_config import recipe
from training.telemetry.curves import LOSSES, PANELS, TRAIN, VALIDATION, Curve, losses
from training.telemetry.metrics_log import Metric

MOST_COLUMNS = 500  # horizontal resolution of one line
COLUMNS = 2000  # shared by the lines of all runs in one chart, so that the page stays below 3 MB
SHORT_HOURS = 1.0  # if all runs are shorter, the axis shows minutes
MARK_COLUMNS = 100  # the width of a chart in columns; each column shows at most one mark of each kind
MOST_RAW = 2  # with at most this number of runs, losses are drawn as logged and as a moving average
LOGARITHMIC_FACTOR = 10.0  # if the largest values of two runs differ by more, the axis is logarithmic
WEIGHTS = "thick: moving average; thin: as logged"
PANEL_COLOR = 2  # color of the curves of a single run, except for its losses
NOISY = (Metric.TRAIN_LOSS, Metric.GRAD_NORM, Metric.TOKENS_PER_SECOND, Metric.MFU)  # drawn as moving averages

# Which values a linear chart shows: see `common_top`.
EARLY_SHARE = 0.05  # the chart may omit high losses in this first part of a run
ORDINARY_SHARE = 0.98  # this share of the values is ordinary; a value far above the ordinary ones is a spike
FEWEST_VALUES = 10  # with fewer values, all are shown
BEARABLE_RANGES = 1.5  # values up to this multiple of the ordinary range are shown as well
BEARABLE_FACTOR = 2.0  # values up to this multiple of the largest ordinary value are shown as well, except for losses
SHOWN_SHARE = 0.25  # at least this share of the values of each run is shown
# If a run's largest values exceed those of an ordinary run by this factor, the chart may omit them.
OUTLYING_FACTOR = 5.0


def charted_axes(histories: Sequence[RunHistory]) -> "list[ChartedAxis]":
    """Return the charts for each x-axis that all runs have recorded."""
    colors = {at: color for color, (_, members) in enumerate(grouped(histories)) for at in members}
    axes = []
    for axis in (axis for axis in AXES if all(axis in history.axes for history in histories)):
        minutes = axis == "hours" and max(history.axes[axis].last for history in histories) < SHORT_HOURS
        unit, factor = ("minutes", 60) if minutes else (axis, 1)
        axes.append(ChartedAxis(histories=histories, name=axis, unit=unit, factor=factor, colors=colors))
    return axes


def legend(histories: Sequence[RunHistory]) -> list[tuple[str, str]]:
    """Return the entries of the legend as (CSS class, meaning).

    Colors stand for runs, or for the losses of a single run. One more entry explains thick and thin lines.
    """
    names = list(losses(histories[0].curves)) if len(histories) == 1 else [name for name, _ in grouped(histories)]
    entries = [(f"s{number % len(PALETTE)}", name) for number, name in enumerate(names)]
    return entries + ([("", WEIGHTS)] if len(histories) <= MOST_RAW else [])


def grouped(histories: Sequence[RunHistory]) -> list[tuple[str, list[int]]]:
    """Return the groups of runs that share a color: for each group, a name and the numbers of its runs.

    Up to eight runs have a color each. With more runs, the runs of the same recipe, which differ only in their seeds,
    share a color. With more than eight recipes, the seven with the lowest loss have a color each, and all remaining
    runs share the eighth color.
    """
    if len(histories) <= len(PALETTE):
        return [(history.name, [at]) for at, history in enumerate(histories)]
    recipes: dict[str, list[int]] = {}
    final_losses = [
        ([curve.last for curve in losses(history.curves).values()][:2] or [np.nan])[-1] for history in histories
    ]
    for at in np.argsort(final_losses, kind="stable").tolist():
        key = str(recipe(histories[at].model, histories[at].train))
        recipes.setdefault(key, []).append(at)
    groups = [(histories[members[0]].name.partition("-seed-")[0], members) for members in recipes.values()]
    rest = [at for _, members in groups[len(PALETTE) - 1 :] for at in members]
    return groups if len(groups) <= len(PALETTE) else [*groups[: len(PALETTE) - 1], (f"{len(rest)} others", rest)]


def common_top(curves: Sequence[Curve], *, losses: bool) -> float:
    """Return the largest value that a chart of these curves shows, or infinity if it shows all values.

    Spikes, outlying runs and, if the curves are `losses`, the first losses of a run may be cut off. No run is hidden
    completely: at least a quarter of each run's values is shown. This matters if there are only two runs, because
    neither of them can be called the ordinary one.
    """
    early_share = EARLY_SHARE if losses else 0.0
    later_values = [
        curve.values[(curve.steps >= early_share * curve.steps[-1]) & np.isfinite(curve.values)] for curve in curves
    ]
    later_values = [values if len(values) else curve.known for values, curve in zip(later_values, curves, strict=True)]
    if sum(map(len, later_values)) < FEWEST_VALUES:
        return np.inf
    tops = [float(np.quantile(values, ORDINARY_SHARE, method="lower")) for values in later_values]
    largest_ordinary_top = OUTLYING_FACTOR * sorted(tops)[(len(tops) - 1) // 2]
    limit = -np.inf
    is_ordinary = [top <= largest_ordinary_top or largest_ordinary_top <= 0 for top in tops]
    lowest = [float(np.quantile(values, SHOWN_SHARE, method="lower")) for values in later_values]
    while True:
        ordinary_runs = [values for values, use in zip(later_values, is_ordinary, strict=True) if use]
        ordinary = np.concatenate(ordinary_runs)
        low, high = float(ordinary.min()), float(np.quantile(ordinary, ORDINARY_SHARE, method="lower"))
        limit = max(limit, low + BEARABLE_RANGES * (high - low), -np.inf if losses else BEARABLE_FACTOR * high)
        hidden = [at for at, value in enumerate(lowest) if value > limit]
        if not hidden:
            break
        # Raise the limit to show all ordinary values of a hidden run, or its values before it diverged.
        for at in hidden:
            diverged = tops[at] > OUTLYING_FACTOR * lowest[at] > 0
            limit = max(limit, lowest[at] if diverged else tops[at])
            is_ordinary[at] = is_ordinary[at] or not diverged
    all_values = np.concatenate([curve.known for curve in curves])
    return np.inf if all_values.max() <= limit else float(all_values[all_values <= limit].max())


@attrs.frozen(kw_only=True)
class ChartedAxis:
    """An x-axis, and the charts that plot all runs against it. Runs are numbered in the order of `histories`."""

    histories: Sequence[RunHistory]
    name: str  # one of AXES
    unit: str  # shown in the charts
    factor: float  # converts values of the axis to `unit`
    colors: dict[int, int]  # by the number of the run

    @property
    def charts(self) -> list[str]:
        """The charts that plot the runs against the axis, as SVG for the page."""
        return [chart.svg() for chart in self._charts() if chart.lines]

    def _charts(self) -> Iterator[LineChart]:
        """Yield the charts of the losses, then all other charts.

        A metric that no run recorded has a chart without lines.
        """
        if len(self.histories) == 1:
            loss_curves = losses(self.histories[0].curves)
            lines = []
            for number, (name, curve) in enumerate(loss_curves.items()):
                key = Metric.TRAIN_LOSS if name == TRAIN else Metric.VALIDATION_LOSS
                lines += self._lines(0, key, curve, name, number % len(PALETTE))
            yield self._line_chart("loss, nats per token", lines, common_top([*loss_curves.values()], losses=True))
        else:
            yield from self._losses(Metric.TRAIN_LOSS, TRAIN)
            yield from self._losses(Metric.VALIDATION_LOSS, VALIDATION)
        for panel in PANELS:
            curves = {
                at: Curve(curve.steps, curve.values * panel.factor)
                for at, curve in self._curves_by_run(panel.metric).items()
            }
            tops = [float(curve.known.max()) for curve in curves.values()]
            uneven = bool(tops) and max(tops) > LOGARITHMIC_FACTOR * min(tops)
            # A run without any positive value could not be drawn on a logarithmic axis.
            positive = bool(tops) and min(tops) > 0
            logarithmic = positive and (uneven or panel.logarithmic)
            yield self._chart(panel.title, panel.metric, curves, logarithmic=logarithmic)

    def _losses(self, key: str, title: str) -> Iterator[LineChart]:
        """Yield the charts of the training loss, or of the validation loss, for several runs.

        Runs with the same tokenizer share a chart in nats per token. Runs with different tokenizers share a chart in
        bits per byte of text; if a run's bytes are unknown, there is a chart in nats per token for each tokenizer.
        """
        curves = self._curves_by_run(key)
        tokenizers = [
            None if tokenizer is None else f"{tokenizer.name} ({tokenizer.vocabulary_size:,} ids)"
            for tokenizer in (history.job.tokenizer for history in self.histories)
        ]
        factors = [history.bits_per_nat for history in self.histories]
        if len({tokenizer for tokenizer in tokenizers if tokenizer is not None}) < 2:
            yield self._chart(f"{title}, nats per token", key, curves)
        elif None not in factors:
            curves = {at: Curve(curve.steps, curve.values * factors[at]) for at, curve in curves.items()}
            yield self._chart(f"{title}, bits per byte of text (the tokenizers differ)", key, curves)
        else:
            for tokenizer in dict.fromkeys(tokenizers):
                comparable_curves = {at: curve for at, curve in curves.items() if tokenizers[at] == tokenizer}
                name = f"{tokenizer or 'an unknown tokenizer'} (not comparable with other tokenizers)"
                yield self._chart(f"{title}, nats per token of {name}", key, comparable_curves)

    def _chart(self, title: str, key: str, curves: dict[int, Curve], *, logarithmic: bool = False) -> LineChart:
        """Return a chart of `curves`, one curve for each run, by the number of the run."""
        lines: list[Line] = []
        for number, curve in curves.items():
            name_and_color = (title, PANEL_COLOR)
            if len(self.histories) > 1:
                name_and_color = self.histories[number].name, self.colors[number]
            lines += self._lines(number, key, curve, *name_and_color)
        shown_curves = [*curves.values()]
        if key in NOISY and not self._shows_raw(key):
            shown_curves = [Curve(curve.steps, curve.smoothed()) for curve in shown_curves]
        top = np.inf if logarithmic or not shown_curves else common_top(shown_curves, losses=key in LOSSES)
        averages = "" if key not in NOISY or self._shows_raw(key) else ", moving average"
        return self._line_chart(title + averages, lines, top, logarithmic=logarithmic)

    def _curves_by_run(self, key: str) -> dict[int, Curve]:
        """Return the curve of one metric for each run that recorded it, by the number of the run."""
        return {number: history.curves[key] for number, history in enumerate(self.histories) if key in history.curves}

    def _line_chart(self, title: str, lines: list[Line], top: float, *, logarithmic: bool = False) -> LineChart:
        columns = min(MOST_COLUMNS, COLUMNS // len(self.histories))
        marks = self._marks()
        return LineChart(
            title=title, axis=self.unit, lines=lines, columns=columns, marks=marks, logarithmic=logarithmic, top=top
        )

    def _shows_raw(self, key: str) -> bool:
        return len(self.histories) <= (MOST_RAW if key in LOSSES else 1)

    def _lines(self, number: int, key: str, curve: Curve, name: str, color: int) -> list[Line]:
        """Return the lines of a run's curve: the logged values, the moving average of a noisy metric, or both."""
        x = self.histories[number].along(self.name, curve.steps) * self.factor
        line = Line(name=name, x=x, y=curve.values, color=color, dotted=key == Metric.VALIDATION_LOSS)
        if key not in NOISY:
            return [line]
        average = attrs.evolve(line, y=curve.smoothed(), weight="bold" if len(self.histories) <= len(PALETTE) else "")
        if not self._shows_raw(key):
            return [average]
        raw = attrs.evolve(line, name=f"{name}, as logged", weight="raw")
        return [raw, attrs.evolve(average, name=f"{name}, average")]

    def _marks(self) -> list[VerticalMark]:
        """Return the events of a single run. The events of several runs would hide the curves."""
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
