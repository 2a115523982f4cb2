"""Heat map: the log-probability of each token of a held-out text, of checkpoints and of their differences."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from common.web_page import render
from reporting.samples.heat_views import DIFFERENCE_NATS, MOST_VIEWED, NATS, HeatView, Measured, heat_views
from reporting.samples.sample_log import CheckpointSample, HeldOutText, spaced
from reporting.samples.token_text import TextCell, text_cells

if TYPE_CHECKING:
    from markupsafe import Markup

MOST_CHECKPOINTS = 40  # that a page can compare; each takes 3 kB
EXTREMES = 6  # cells of greatest gain, and of greatest loss
CONTEXT_CELLS = 16  # shown before one of them
# Why a run is left out.
NOT_RECORDED = "no log-probabilities are recorded for it"
OTHER_TEXT = "it was measured on another text, with another tokenizer or with another context"


@attrs.frozen(kw_only=True)
class ShownCell:
    """A cell as the page has it."""

    text: str
    classes: str
    about: str  # shown under the pointer, with the value of each view
    values: list[str]  # none of a token that is not predicted


@attrs.frozen(kw_only=True)
class Extreme:
    """A cell whose log-probability differs much, with the text before it."""

    before: str
    text: str
    difference: float


def heat_map(runs: Sequence[tuple[str, Sequence[CheckpointSample]]]) -> str | None:
    """Return the heat map of named runs as HTML; None where there is nothing to show.

    Several runs are compared on the text of the first one that has one; a line names those left out, and why.
    """
    usable = [(name, [sample for sample in samples if sample.log_probabilities]) for name, samples in runs]
    text = next((samples[-1].held_out for _, samples in usable if samples), None)
    if text is None:
        return None
    cells = text_cells(text.tokens)
    same = {name: [one for one in samples if _is_same(one.held_out, text)] for name, samples in usable}
    reasons = [(name, OTHER_TEXT if samples else NOT_RECORDED) for name, samples in usable if not same[name]]
    measured = [
        _measured_run(name if len(runs) > 1 else "", same[name], len(runs), cells) for name in same if same[name]
    ]
    views = heat_views(measured)
    every = [each for of_run in measured for each in of_run]
    differences = [view for view in views if view.second is not None]
    return render(
        "heat_map.html",
        text=text,
        cells=[_shown(cell, number, views, text) for number, cell in enumerate(cells)],
        measured=every,
        views=views,
        labels=[css_string(f"\n{view.label}: ") for view in views],
        viewed_runs=min(MOST_VIEWED, len(measured)),
        run_count=len(measured),
        left_out=reasons,
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


def css_string(text: str) -> "Markup":
    """Return a string for a style sheet, in which only letters and digits stand as they are."""
    from markupsafe import Markup

    signs = (one if one.isascii() and one.isalnum() else f"\\{ord(one):06x}" for one in text)
    return Markup('"' + "".join(signs) + '"')


def _is_same(one: HeldOutText | None, other: HeldOutText) -> bool:
    """Tell whether checkpoints predicted the same tokens, each from as many before it."""
    return one is not None and (one.ids, one.tokens, one.window) == (other.ids, other.tokens, other.window)


def _measured_run(name: str, samples: list[CheckpointSample], runs: int, cells: list[TextCell]) -> list[Measured]:
    prefix = f"{name}, " if name else ""
    chosen = spaced(samples, max(2, MOST_CHECKPOINTS // runs))
    return [_measured(f"{prefix}step {sample.step:,}", sample, cells) for sample in chosen]


def _measured(label: str, sample: CheckpointSample, cells: list[TextCell]) -> Measured:
    values = [None, *(sample.log_probabilities or [])]  # nothing predicts the first token
    return Measured(
        label=label,
        values=[_sum(values[cell.first : cell.first + cell.count]) for cell in cells],
        mean_nats=sample.mean_nats,
    )


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


def _shown(cell: TextCell, number: int, views: list[HeatView], text: HeldOutText) -> ShownCell:
    colours = [f"v{at}{view.colour(number)}" for at, view in enumerate(views)]
    starts_window = (cell.first - 1) % text.window == 0 and cell.first > 0
    kinds = [*([] if cell.kind == "text" else [cell.kind]), *(["w"] if starts_window else [])]
    values = [view.text(number) for view in views] if cell.first else []
    about = _about(cell, text, starts_window=starts_window)
    return ShownCell(text=cell.text, classes=" ".join([*colours, *kinds]), about=about, values=values)


def _about(cell: TextCell, text: HeldOutText, *, starts_window: bool) -> str:
    """Return the tokens of a cell, and how they were predicted."""
    tokens = f"token {cell.first}" if cell.count == 1 else f"tokens {cell.first} to {cell.first + cell.count - 1}"
    ids = ", ".join(str(each) for each in text.ids[cell.first : cell.first + cell.count])
    about = f"{cell.text.strip() or cell.text!r}  {tokens} of {len(text.ids) - 1}, id {ids}"
    if cell.first == 0:
        return f"{about}\nthe first token: not predicted"
    return about + (f"\nfirst of a window of {text.window}: predicted from one token" if starts_window else "")


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
