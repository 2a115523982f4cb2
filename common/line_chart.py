"""Line charts as inline SVG with labels in HTML: they fit any width, and need no script.

The drawing is stretched to its frame, so lines and dots have widths in pixels of the screen. A script may zoom: it
finds the ranges in `data-` attributes and sets the drawing's viewBox.
"""

import math
from collections.abc import Sequence
from html import escape

import attrs
import numpy as np

from common.chart_scale import short, tick_labels, ticks, value_range

SIZE = 10_000  # of the drawing, in its own units
FARTHEST = 100_000 * SIZE  # from the frame that a value outside is drawn
MARGIN = 0.04  # of the range of values, above and below
SIDE_MARGIN = 0.01  # of the x axis: no dot or event lies on the edge
MOST_DOTS = 40  # points of a line that are marked: more would hide the lines below


@attrs.frozen(kw_only=True, eq=False)
class Line:
    """A line of a chart."""

    name: str
    x: np.ndarray  # ascending, (n,)
    y: np.ndarray  # NaN: a gap
    colour: str  # CSS class, s0 to s7
    weight: str = ""  # CSS class: "raw" is thin, "bold" thick
    dotted: bool = False  # its points are marked where they are few


@attrs.frozen(kw_only=True)
class VerticalMark:
    """An event, drawn as a vertical line."""

    x: float
    style: str
    text: str


@attrs.frozen(kw_only=True, eq=False)
class LineChart:
    """A chart: lines over one axis."""

    title: str
    axis: str  # name of the x axis, with its unit
    lines: Sequence[Line]
    columns: int  # of pixels that a line is drawn in: its extremes in each are kept
    marks: Sequence[VerticalMark] = ()
    logarithmic: bool = False
    top: float | None = None  # largest value to show; None: all are

    def svg(self) -> str:
        """Return the chart as HTML."""
        x_range, y_range = self._x_range(), self._y_range()
        frame = _Frame(x_range=x_range, y_range=y_range, logarithmic=self.logarithmic, columns=self.columns)
        x_ticks, y_ticks = ticks(*x_range, logarithmic=False), ticks(*y_range, logarithmic=self.logarithmic)
        grid = "".join(f"M0 {frame.down(value)}H{SIZE}" for value, _ in y_ticks)
        drawn = [f'<path class="grid" d="{grid}"/>']
        for mark in self.marks:
            place = frame.across(mark.x)
            drawn.append(
                f'<path class="mark {mark.style}" d="M{place} 0V{SIZE}"><title>{escape(mark.text)}</title></path>'
            )
        drawn += map(frame.drawn, self.lines)
        title = self._described_title()
        described = escape(f"{title} over {self.axis}: {self._ends()}", quote=True)
        ranges = " ".join(f"{value:.10g}" for value in (*x_range, *y_range))
        return (
            f'<figure class="chart" data-ranges="{ranges}" data-log="{int(self.logarithmic)}">'
            f"<figcaption>{escape(title)}</figcaption>"
            f'<div class="y">{tick_labels(y_ticks, frame.up_share, "bottom")}</div>'
            f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" aria-label="{described}">'
            f"{''.join(drawn)}</svg>"
            f'<div class="x">{tick_labels(x_ticks, frame.across_share, "left")}</div>'
            f'<div class="axis">{escape(self.axis)}</div></figure>'
        )

    def _x_range(self) -> tuple[float, float]:
        marks = np.array([0.0, *(mark.x for mark in self.marks)])
        return _widened(*value_range([marks, *(line.x for line in self.lines)]), SIDE_MARGIN)

    def _y_range(self) -> tuple[float, float]:
        values = [line.y[np.isfinite(line.y)] for line in self.lines]
        shown = values if self.top is None else [one[one <= self.top] for one in values]
        if self.logarithmic:
            positive = np.concatenate([one[one > 0] for one in shown])
            low, high = (float(positive.min()), float(positive.max())) if len(positive) else (1.0, 10.0)
            return low / 1.2, high * 1.2
        return _widened(*value_range(shown), MARGIN)

    def _described_title(self) -> str:
        """Return the title with the kind of the axis, and the values outside it."""
        title = f"{self.title}, logarithmic axis" if self.logarithmic else self.title
        top = math.inf if self.top is None else self.top
        values = {line.name: line.y[np.isfinite(line.y)] for line in self.lines}
        highest = max(float(one.max(initial=-math.inf)) for one in values.values())
        if highest <= top:
            return title
        whole = [name for name, one in values.items() if one.min(initial=math.inf) > top]
        lines = f"; all values of {', '.join(whole)}" if whole else ""
        return f"{title} (values above {short(top)} lie outside, up to {short(highest)}{lines})"

    def _ends(self) -> str:
        ends = [(line.name, line.y[np.isfinite(line.y)]) for line in self.lines if line.weight != "raw"]
        return "; ".join(f"{name} ends at {short(float(values[-1]))}" for name, values in ends if len(values))


@attrs.frozen(kw_only=True)
class _Frame:
    """Map from values to the units of the drawing."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    logarithmic: bool
    columns: int

    def across_share(self, x: float) -> float:
        return (x - self.x_range[0]) / (self.x_range[1] - self.x_range[0])

    def up_share(self, y: float) -> float:
        low, high = self.y_range
        if self.logarithmic:
            return math.log(y / low) / math.log(high / low)
        return (y - low) / (high - low)

    def across(self, x: float) -> int:
        return round(SIZE * self.across_share(x))

    def down(self, y: float) -> int:
        return round(SIZE * (1 - self.up_share(y)))

    def drawn(self, line: Line) -> str:
        """Return a line as SVG, its dots as strokes of no length: of a dotted line, and of points without neighbors."""
        known, across, down = self._points(line)
        before, after = np.append(False, known[:-1]), np.append(known[1:], False)
        dotted = known if line.dotted and known.sum() <= MOST_DOTS else known & ~before & ~after
        places = [f"{one} {two}" for one, two in zip(across.tolist(), down.tolist(), strict=True)]
        path = "".join(("L" if before[at] else "M") + places[at] for at in np.flatnonzero(known))
        dots = "".join(f"M{places[at]}h0" for at in np.flatnonzero(dotted))
        name = escape(line.name, quote=True)
        drawn = f'<path class="line {line.colour} {line.weight}" data-name="{name}" d="{path}"/>'
        return drawn + (f'<path class="dots {line.colour}" d="{dots}"/>' if dots else "")

    def _points(self, line: Line) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which points of a line are known, and where they lie."""
        x, y = extremes(line.x, line.y, self.columns)
        low, high = self.x_range
        across = np.rint(SIZE * (x - low) / (high - low))
        with np.errstate(invalid="ignore", divide="ignore"):
            up = (np.log(y) if self.logarithmic else y).astype(np.float64)
            first, last = (math.log(one) if self.logarithmic else one for one in self.y_range)
            down = np.rint(SIZE * (1 - (up - first) / (last - first)))
        known = np.isfinite(down)
        down = np.clip(np.where(known, down, 0), -FARTHEST, FARTHEST)
        return known, across.astype(int), down.astype(int)


def extremes(x: np.ndarray, y: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most so many columns of points: of each the lowest and the highest, in their order, and gaps (NaN)."""
    if len(x) <= 2 * columns:
        return x, y
    width = (x[-1] - x[0]) / columns or 1.0
    column = np.minimum(((x - x[0]) / width).astype(int), columns - 1)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    kept = [0, len(x) - 1]
    for start, end in zip(starts, [*starts[1:], len(x)], strict=True):
        known = start + np.flatnonzero(np.isfinite(y[start:end]))
        if len(known):
            kept += [int(known[np.argmin(y[known])]), int(known[np.argmax(y[known])])]
        if len(known) < end - start:
            kept.append(int(start + np.flatnonzero(~np.isfinite(y[start:end]))[0]))
    chosen = np.unique(kept)
    return x[chosen], y[chosen]


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    reach = (high - low) * share
    return low - reach, high + reach
