"""Heat map: the log-probability of each token of a held-out text, of checkpoints and of their differences."""

import math
from collections.abc import Sequence

import attrs

from reporting.page_templates import render
from reporting.samples.sample_log import CheckpointSample, HeldOutText, spaced
from reporting.samples.token_text import TextCell, text_cells

MOST_CHECKPOINTS = 40  # that a page can compare; each takes 3 kB
EXTREMES = 6  # cells of greatest gain, and of greatest loss
CONTEXT_CELLS = 16  # shown before one of them
# Upper bounds of the colours, in nats: of a surprise, and of a difference either way.
NATS = (0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
DIFFERENCE_NATS = (0.05, 0.2, 0.5, 1.0, 2.0)


@attrs.frozen(kw_only=True)
class Measured:
    """A checkpoint, with the log-probability of each cell of the text, in nats; None: not predicted, or not finite."""

    label: str
    values: list[float | None]
    mean_nats: float | None  # per token


@attrs.frozen(kw_only=True)
class HeatView:
    """A colouring of the text: of one checkpoint, or of its difference from a second one."""

    label: str
    first: Measured
    second: Measured | None = None

    def value(self, cell: int) -> float | None:
        """Return what colours a cell: a log-probability, or by how much the first one's is greater."""
        one = self.first.values[cell]
        if self.second is None or one is None:
            return one
        other = self.second.values[cell]
        return None if other is None else one - other

    def colour(self, cell: int) -> str:
        """Return a cell's colour: p0 (expected) to p8; a1 to a5 where the first one is better, b1 to b5, or z; u."""
        value = self.value(cell)
        if value is None:
            return "u"
        if self.second is None:
            return f"p{sum(-value >= bound for bound in NATS)}"
        level = sum(abs(value) >= bound for bound in DIFFERENCE_NATS)
        return f"{'a' if value > 0 else 'b'}{level}" if level else "z"


@attrs.frozen(kw_only=True)
class ShownCell:
    """A cell as the page has it."""

    text: str
    classes: str
    about: str  # shown under the pointer


@attrs.frozen(kw_only=True)
class Extreme:
    """A cell whose log-probability differs much, with the text before it."""

    before: str
    text: str
    difference: float


def heat_map(runs: Sequence[tuple[str, Sequence[CheckpointSample]]]) -> str | None:
    """Return the heat map of named runs as HTML; None where there is nothing to show.

    Several runs are compared on the text of the first one; a line says which of them have another text.
    """
    usable = [(name, [sample for sample in samples if sample.log_probabilities]) for name, samples in runs]
    text = next((samples[-1].held_out for _, samples in usable if samples), None)
    if text is None:
        return None
    cells = text_cells(text.tokens)
    measured: list[list[Measured]] = []  # of each run
    others = []
    for name, samples in usable:
        same = [sample for sample in samples if _is_same(sample.held_out, text)]
        if not same:
            others.append(name)
            continue
        prefix = f"{name}, " if len(runs) > 1 else ""
        chosen = spaced(same, max(2, MOST_CHECKPOINTS // len(runs)))
        measured.append([_measured(f"{prefix}step {sample.step:,}", sample, cells) for sample in chosen])
    views = _views(measured)
    every = [each for of_run in measured for each in of_run]
    differences = [view for view in views if view.second is not None]
    return render(
        "heat_map.html",
        text=text,
        cells=_shown(cells, views, text),
        measured=every,
        views=views,
        others=others,
        extremes=[(view, *_extremes(cells, view)) for view in differences],
        legend=[(bound, math.exp(-bound)) for bound in NATS],
        difference_nats=DIFFERENCE_NATS,
        data={
            "labels": [each.label for each in every],
            "values": [_hundredths(each) for each in every],
            "nats": NATS,
            "difference": DIFFERENCE_NATS,
        },
    )


def _is_same(one: HeldOutText | None, other: HeldOutText) -> bool:
    """Tell whether checkpoints predicted the same tokens, each from as many before it."""
    return one is not None and (one.ids, one.tokens, one.window) == (other.ids, other.tokens, other.window)


def _measured(label: str, sample: CheckpointSample, cells: list[TextCell]) -> Measured:
    values = [None, *(sample.log_probabilities or [])]  # nothing predicts the first token
    known = [value for value in values if value is not None]
    return Measured(
        label=label,
        values=[_sum(values[cell.first : cell.first + cell.count]) for cell in cells],
        mean_nats=-math.fsum(known) / len(known) if known else None,
    )


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


def _views(measured: list[list[Measured]]) -> list[HeatView]:
    """Return the views: of one run its last, middle and first checkpoint, of several the last of each."""
    if len(measured) == 1:
        [run] = measured
        singles = [run[number] for number in sorted({0, len(run) // 2, len(run) - 1}, reverse=True)]
        pairs = [(run[-1], run[number]) for number in sorted({0, max(0, len(run) - 2)}) if run[number] is not run[-1]]
    else:
        singles = [run[-1] for run in measured[:3]]
        pairs = [(run[-1], measured[0][-1]) for run in measured[1:3]]
    differences = [
        HeatView(label=f"{one.label} against {other.label}", first=one, second=other) for one, other in pairs
    ]
    return [*(HeatView(label=each.label, first=each) for each in singles), *differences]


def _shown(cells: list[TextCell], views: list[HeatView], text: HeldOutText) -> list[ShownCell]:
    shown = []
    for number, cell in enumerate(cells):
        colours = [f"v{at}{view.colour(number)}" for at, view in enumerate(views)]
        starts_window = (cell.first - 1) % text.window == 0 and cell.first > 0
        classes = " ".join([*colours, *([cell.kind] if cell.kind != "text" else []), *(["w"] if starts_window else [])])
        shown.append(ShownCell(text=cell.text, classes=classes, about=_about(cell, number, views, text)))
    return shown


def _about(cell: TextCell, number: int, views: list[HeatView], text: HeldOutText) -> str:
    """Return what is told about a cell: its tokens, and its log-probability and probability in each view."""
    tokens = f"token {cell.first}" if cell.count == 1 else f"tokens {cell.first} to {cell.first + cell.count - 1}"
    ids = ", ".join(str(each) for each in text.ids[cell.first : cell.first + cell.count])
    lines = [f"{cell.text.strip() or cell.text!r}  {tokens} of {len(text.ids) - 1}, id {ids}"]
    if cell.first == 0:
        return f"{lines[0]}\nthe first token: not predicted"
    if (cell.first - 1) % text.window == 0:
        lines.append(f"first of a window of {text.window}: predicted from one token")
    for view in views:
        value = view.value(number)
        if value is None:
            lines.append(f"{view.label}: not finite")
        elif view.second is None:
            lines.append(f"{view.label}: {value:.2f} nats, {_percent(math.exp(value))}")
        else:
            lines.append(f"{view.label}: {value:+.2f} nats")
    return "\n".join(lines)


def _percent(probability: float) -> str:
    return f"{probability:.1%}" if probability >= 0.001 else f"{probability:.1e}"


def _extremes(cells: list[TextCell], view: HeatView) -> tuple[list[Extreme], list[Extreme]]:
    """Return the cells that the first checkpoint predicts better by most, and those that it predicts worse by most."""
    values = [(value, number) for number in range(len(cells)) if (value := view.value(number)) is not None]
    ordered = sorted(values)
    gains = [_extreme(cells, number, value) for value, number in reversed(ordered[-EXTREMES:]) if value > 0]
    return gains, [_extreme(cells, number, value) for value, number in ordered[:EXTREMES] if value < 0]


def _extreme(cells: list[TextCell], number: int, difference: float) -> Extreme:
    before = "".join(cell.text for cell in cells[max(0, number - CONTEXT_CELLS) : number])
    return Extreme(before=before.replace("\n", ""), text=cells[number].text, difference=difference)


def _hundredths(measured: Measured) -> list[int | None]:
    """Return the values in hundredths of a nat, for the script."""
    return [None if value is None else round(100 * value) for value in measured.values]
