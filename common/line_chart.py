"""Line charts. A chart can be drawn as SVG with HTML labels, for a page of any width, or as a PNG by matplotlib."""

import importlib.util
import io
import math
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import attrs
import numpy as np

# Colors on a white background, for the CSS classes s0 to s7. page.css has the colors for a black background.
PALETTE = ("#0b62c4", "#c2410c", "#0f7b54", "#8e3bb8", "#8a6d00", "#c0266d", "#007c91", "#6b5b4b")
SIZE = 10_000  # width and height of the drawing, in its own units
FARTHEST = 100_000 * SIZE  # values that are farther from the frame than this are drawn at this distance
MARGIN = 0.04  # space above and below the values, as a share of their range
SIDE_MARGIN = 0.01  # space on both sides, as a share of the x axis, so that no dot or mark is on the edge
# A tick label beyond this share of the x axis is right-aligned to its tick, so that it stays inside the chart.
LAST_SHARE = 0.96
MOST_DOTS = 40  # a line with more points is drawn without dots, because they would hide other lines
# Two neighboring dots of a line are not joined if their values differ by more than this share of the line's range.
# Joined dots would look as if there were values between them.
LONGEST_JOIN = 0.7
TICKS = 5
MOST_POWERS = 8  # maximum number of powers of ten that are labeled on a logarithmic axis
SOURCE = "Lockstep"  # content of the text chunk "Source" of our PNG files; files that have it may be replaced
WIDTH, HEIGHTS = 9, (5, 8)  # in inches: the width of a PNG, its height with one chart, and its height with several
DOTS_PER_INCH = 110
EARLIER_SIZES = ((990, 550), (990, 880))  # in pixels; PNG files of earlier versions have these sizes and no SOURCE


@attrs.frozen(kw_only=True, eq=False)
class Line:
    """A line of a chart."""

    name: str
    x: np.ndarray  # ascending, (n,)
    y: np.ndarray  # NaN: a gap
    color: int  # index in PALETTE
    weight: str = ""  # CSS class: "raw" is thin, "bold" is thick
    dotted: bool = False  # if there are few points, mark them with dots and join them with dashes
    filled: bool = False  # fill the area between the line and 0; only in a PNG


@attrs.frozen(kw_only=True)
class VerticalMark:
    """An event, drawn as a vertical line."""

    x: float
    style: str  # CSS class
    text: str


@attrs.frozen(kw_only=True, eq=False)
class LineChart:
    """A chart: lines that share an x axis."""

    title: str
    axis: str  # name of the x axis, with its unit
    lines: Sequence[Line]
    columns: int = SIZE  # number of columns of pixels; in each of them, a line is reduced to its extremes
    marks: Sequence[VerticalMark] = ()
    logarithmic: bool = False
    logarithmic_x: bool = False
    top: float = math.inf  # largest value to show

    def svg(self) -> str:
        """Return the chart as HTML.

        A script can zoom: the SVG has a viewBox, and `data-` attributes contain the ranges of the axes.
        """
        x = self._x_scale()
        y = self._y_scale()
        grid = "".join(f"M0 {round(SIZE * (1 - float(y.share(value))))}H{SIZE}" for value, _ in y.ticks())
        paths = [f'<path class="grid" d="{grid}"/>']
        for mark in self.marks:
            position = f'd="M{round(SIZE * x.share(mark.x))} 0V{SIZE}"'
            paths.append(f'<path class="mark {mark.style}" {position}><title>{escape(mark.text)}</title></path>')
        paths += (_path(line, x, y, self.columns) for line in self.lines)
        title = self._described_title()
        ends = [(line.name, line.y[np.isfinite(line.y)]) for line in self.lines if line.weight != "raw"]
        summary = "; ".join(f"{name} ends at {short(float(values[-1]))}" for name, values in ends if len(values))
        ranges = " ".join(f"{value:.10g}" for value in (x.low, x.high, y.low, y.high))
        return (
            f'<figure class="chart" data-ranges="{ranges}" data-log="{int(self.logarithmic)}" '
            f'data-log-x="{int(self.logarithmic_x)}">'
            f"<figcaption>{escape(title)}</figcaption>"
            f'<div class="y">{y.labels("bottom")}</div>'
            f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(f"{title} over {self.axis}: {summary}")}">{"".join(paths)}</svg>'
            f'<div class="x">{x.labels("left")}</div>'
            f'<div class="axis">{escape(self.axis)}</div></figure>'
        )

    def _x_scale(self) -> "Scale":
        values = [np.array([mark.x for mark in self.marks]), *(line.x for line in self.lines)]
        if self.logarithmic_x:
            return _powers_of(values, 1.1)
        return Scale(*value_range([np.zeros(1), *values], SIDE_MARGIN))

    @property
    def _shown_top(self) -> float:
        """The largest value to show: `top`, or more if `top` is so low that it would hide a whole line."""
        lowest = [float(line.y[np.isfinite(line.y)].min(initial=math.inf)) for line in self.lines]
        return max([self.top, *(value for value in lowest if math.isfinite(value))])

    def _y_scale(self) -> "Scale":
        shown = [line.y[np.isfinite(line.y) & (line.y <= self._shown_top)] for line in self.lines]
        if self.logarithmic:
            return _powers_of(shown, 1.2)
        scale = Scale(*value_range(shown, MARGIN))
        return attrs.evolve(scale, low=0.0) if any(line.filled for line in self.lines) else scale

    def _described_title(self) -> str:
        """Return the title, with a note if the axis is logarithmic or if some values are too large to be shown."""
        title = f"{self.title}, logarithmic axis" if self.logarithmic else self.title
        values = {line.name: line.y[np.isfinite(line.y)] for line in self.lines}
        highest, top = max(float(line.max(initial=-math.inf)) for line in values.values()), self._shown_top
        if highest <= top:
            return title
        return f"{title} (values above {short(top)} are not shown; the largest is {short(highest)})"


@attrs.frozen
class Scale:
    """The scale of an axis: its two ends, and the round values in between, which are labeled."""

    low: float
    high: float
    logarithmic: bool = False

    def share(self, values: Any) -> Any:
        """Return the positions of values as shares of the axis; NaN for values that a logarithmic axis cannot show."""
        with np.errstate(invalid="ignore", divide="ignore"):
            if self.logarithmic:
                return np.log(np.asarray(values, np.float64) / self.low) / math.log(self.high / self.low)
            return (np.asarray(values, np.float64) - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return round values between the ends of the axis, with their labels."""
        powers = self._powers() if self.logarithmic else []
        return [(value, short(value)) for value in powers] if len(powers) > 1 else self._multiples()

    def labels(self, side: str) -> str:
        """Return the labels of the axis as HTML. The axis starts at `side`, which is "left" or "bottom"."""
        positions = [(float(self.share(value)), text) for value, text in self.ticks()]
        return "".join(
            f'<span{" class=last" if side == "left" and share > LAST_SHARE else ""} style="{side}:{100 * share:.2f}%">'
            f"{escape(text)}</span>"
            for share, text in positions
        )

    def _multiples(self) -> list[tuple[float, str]]:
        rough = (self.high - self.low) / TICKS
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * (1 - 1e-9))
        numbers = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
        return [(number * step, short(number * step, step)) for number in numbers]

    def _powers(self) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        powers = powers[:: math.ceil(len(powers) / MOST_POWERS)]
        decades = math.log10(self.high / self.low)
        factors = (1,) if decades > 3 else (1, 3) if decades > 1 else (1, 1.5, 2, 3, 5, 7)
        values = (factor * 10.0**power for power in powers for factor in factors)
        return [value for value in values if self.low <= value <= self.high]


def png(charts: Sequence[LineChart], title: str, heights: Sequence[float] = (1,)) -> bytes:
    """Return a PNG of several charts, one below the other, with a common x axis.

    It is drawn with Agg and matplotlib's default style on every machine.
    """
    with _default_settings():
        return _png(charts, title, heights)


def _png(charts: Sequence[LineChart], title: str, heights: Sequence[float]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = HEIGHTS[len(charts) > 1]
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    # The margins are fixed, because computing them would take as long as the drawing itself.
    figure.subplots_adjust(left=0.11, right=0.96, top=1 - 0.4 / height, bottom=0.5 / height, hspace=0.08)
    rows = figure.subplots(len(charts), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for chart, axes in zip(charts, rows, strict=True):
        for line in chart.lines:
            _draw(axes, line)
        for mark in chart.marks:
            axes.axvline(mark.x, color="gray", linestyle=":", linewidth=1)
        y = chart._y_scale()
        axes.set(yscale="log" if y.logarithmic else "linear", ylim=(y.low, y.high))
        # A low chart has no room for a long title in one line; at a comma, it continues in the next line.
        axes.set_ylabel(chart.title.replace(", ", ",\n"))
        axes.set_yticks(*zip(*y.ticks(), strict=True))
        axes.minorticks_off()
        axes.yaxis.set_label_coords(-0.075, 0.5)
        axes.grid(alpha=0.25)
        if len(chart.lines) > 1:
            axes.legend(loc="upper right")
    # Of several marks with the same text, only the first is labeled.
    for mark in {mark.text: mark for mark in reversed(charts[0].marks)}.values():
        style = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 8, "color": "gray"}
        rows[0].text(mark.x, 0.97, mark.text, style, transform=rows[0].get_xaxis_transform())
    rows[0].set_title(title, parse_math=False)  # so that a dollar sign does not start a formula
    x = attrs.evolve(charts[-1], lines=[line for chart in charts for line in chart.lines])._x_scale()
    rows[-1].set(xscale="log" if x.logarithmic else "linear", xlim=(x.low, x.high), xlabel=charts[-1].axis)
    rows[-1].set_xticks(*zip(*x.ticks(), strict=True))
    rows[-1].minorticks_off()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=DOTS_PER_INCH, format="png", metadata={"Source": SOURCE})
    return picture.getvalue()


def is_own_png(content: bytes) -> bool:
    """Return whether a file is a picture that `png` has drawn.

    Pictures of earlier versions do not contain SOURCE. They are recognized by their sizes and by matplotlib's name.
    """
    if f"Source\0{SOURCE}".encode() in content:
        return True
    sizes = [struct.pack(">II", *size) for size in EARLIER_SIZES]
    return content[16:24] in sizes and b"Software\0Matplotlib" in content  # bytes 16 to 24 are the width and the height


@contextmanager
def _default_settings() -> Iterator[None]:
    """Use matplotlib without the user's settings, such as a notebook's MPLBACKEND or the style of a matplotlibrc."""
    if "matplotlib" not in sys.modules:  # matplotlib reads the settings, and refuses wrong ones, when it is imported
        package = importlib.util.find_spec("matplotlib")
        folder = next(iter((package and package.submodule_search_locations) or [""]))
        default_settings = {"MPLBACKEND": "agg", "MATPLOTLIBRC": str(Path(folder, "mpl-data", "matplotlibrc"))}
        user_settings = {name: os.environ.get(name) for name in default_settings}
        os.environ.update(default_settings)
        try:
            import matplotlib
        finally:
            for name, value in user_settings.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def value_range(values: Sequence[np.ndarray], margin: float = 0.0) -> tuple[float, float]:
    """Return the smallest and the largest finite value, moved apart if they are equal.

    `margin` is added on both sides, as a share of the distance between them.
    """
    joined = np.concatenate([np.zeros(0), *(array[np.isfinite(array)] for array in values)])
    first, last = (float(joined.min()), float(joined.max())) if len(joined) else (0.0, 0.0)
    if last - first <= 1e-9 * max(abs(first), abs(last)):
        first, last = (first - 0.1 * abs(first), last + 0.1 * abs(last)) if first else (0.0, 1.0)
    width = (last - first) * margin
    return first - width, last + width


def short(value: float, step: float | None = None) -> str:
    """Return a number in a few characters: 1.5M, 2k, 0.004.

    `step` is the distance between neighboring labels; it determines the number of digits.
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (1 if step is None else 1 - 1e-9):
            return f"{value / size:.4g}{letter}"
    if step is not None and step < 1:
        exponent = math.floor(math.log10(step) + 1e-9)
        halves = not math.isclose(step / 10**exponent, round(step / 10**exponent))  # a step of 2.5 needs one more digit
        return f"{value:.{halves - exponent}f}"
    return f"{value:.4g}"


def extremes(x: np.ndarray, y: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduce the points of a line to those that are visible if the chart is `columns` pixels wide.

    From each column of pixels, the lowest point, the highest point and one gap (NaN) are kept, in their original order.
    """
    if len(x) <= 2 * columns:
        return x, y
    width = (x[-1] - x[0]) / columns or 1.0
    column = np.minimum(((x - x[0]) / width).astype(int), columns - 1)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    indices = [0, len(x) - 1]
    for start, end in zip(starts, [*starts[1:], len(x)], strict=True):
        finite = start + np.flatnonzero(np.isfinite(y[start:end]))
        if len(finite):
            indices += [int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])]
        if len(finite) < end - start:
            indices.append(int(start + np.flatnonzero(~np.isfinite(y[start:end]))[0]))
    unique_indices = np.unique(indices)
    return x[unique_indices], y[unique_indices]


def _path(line: Line, x: Scale, y: Scale, columns: int) -> str:
    """Return a line as SVG.

    The points of a dotted line, and points without neighbors, are drawn as dots. A dot is a stroke of length zero.
    """
    dotted, line_x, line_y = _joined(line)
    line_x, line_y = extremes(line_x, line_y, columns)
    across, down = np.rint(SIZE * x.share(line_x)).astype(int), np.rint(SIZE * (1 - y.share(line_y)))
    finite = np.isfinite(down)
    down = np.clip(np.where(finite, down, 0), -FARTHEST, FARTHEST).astype(int)
    before, after = np.append(False, finite[:-1]), np.append(finite[1:], False)
    marked = finite if dotted else finite & ~before & ~after
    points = [f"{point_x} {point_y}" for point_x, point_y in zip(across.tolist(), down.tolist(), strict=True)]
    path = "".join(("L" if before[index] else "M") + points[index] for index in np.flatnonzero(finite))
    dots = "".join(f"M{points[index]}h0" for index in np.flatnonzero(marked))
    weight = "joined" if dotted else line.weight
    element = f'<path class="line s{line.color} {weight}" data-name="{escape(line.name)}" d="{path}"/>'
    return element + (f'<path class="dots s{line.color}" d="{dots}"/>' if dots else "")


def _draw(axes: Any, line: Line) -> None:
    raw, bold = line.weight == "raw", line.weight == "bold"
    dotted, x, y = _joined(line)
    axes.plot(
        x,
        y,
        color=PALETTE[line.color],
        alpha=0.35 if raw else 1.0,
        linestyle="--" if dotted else "-",
        linewidth=1 + bold,
        marker="o" if dotted or np.isfinite(y).sum() == 1 else "",
        markersize=4,
        # A label that starts with "_" is not in the legend. An escaped dollar sign does not start a formula.
        label=f"_{line.name}" if raw else line.name.replace("$", r"\$"),
    )
    if line.filled:
        axes.fill_between(x, y, color=PALETTE[line.color], alpha=0.25)


def _joined(line: Line) -> tuple[bool, np.ndarray, np.ndarray]:
    """Return whether a line is drawn with dots, and the x and y values of its points.

    For a line with dots, the points include a gap (NaN) between two points that are too far apart to be joined.
    """
    values = line.y[np.isfinite(line.y)]
    if not line.dotted or not 0 < len(values) <= MOST_DOTS:
        return False, line.x, line.y
    gaps = 1 + np.flatnonzero(np.abs(np.diff(line.y)) > LONGEST_JOIN * np.ptp(values))
    return True, np.insert(line.x, gaps, line.x[gaps]), np.insert(line.y, gaps, np.nan)


def _powers_of(values: Sequence[np.ndarray], margin: float) -> Scale:
    """Return a logarithmic scale that covers the positive values.

    `margin` is the factor by which the scale is extended at both ends.
    """
    positive = np.concatenate([np.zeros(0), *(array[array > 0] for array in values)])
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (1.0, 10.0)
    return Scale(low / margin, high * margin, logarithmic=True)
