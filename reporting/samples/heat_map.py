"""Heat map: the log-probability of each token of a held-out text, of checkpoints and of their differences."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from common.web_page import render
from reporting.samples.sample_log import CheckpointSample, HeldOutText, spaced
from reporting.samples.token_text import TextCell, text_cells

if TYPE_CHECKING:
    from markupsafe import Markup

MOST_CHECKPOINTS = 40  # that a page can compare; each takes 3 kB
EXTREMES = 6  # cells of greatest gain, and of greatest loss
CONTEXT_CELLS = 16  # shown before one of them
# Lower bounds of the colours, in nats: of a negative log-probability, and of a difference either way.
NATS = (0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
DIFFERENCE_NATS = (0.05, 0.2, 0.5, 1.0, 2.0)
# Why a run is left out.
NOT_RECORDED = "no log-probabilities are recorded for it"
OTHER_TEXT = "it was measured on another text, with another tokenizer or with another context"


@attrs.frozen(kw_only=True)
class Measured:
    """A checkpoint, with the log-probability of each cell of the text, in nats; None: not predicted, or not finite."""

    label: str
    values: list[float | None]
    mean_nats: float | None  # per token

    def minus(self, other: "Measured") -> "Measured":
        """Return the difference of the log-probabilities."""
        pairs = zip(self.values, other.values, strict=True)
        values = [None if one is None or two is None else one - two for one, two in pairs]
        return Measured(label=f"{self.label} against {other.label}", values=values, mean_nats=None)


def heat_map(runs: Sequence[tuple[str, Sequence[CheckpointSample]]]) -> "Markup | None":
    """Return the heat map of named runs as HTML; None where there is nothing to show.

    Several runs are compared on the text of the first one that has one; a line names those left out, and why. Without a
    script, the last checkpoint is shown, and its difference from the first one, or from that of a second run.
    """
    usable = [(name, [sample for sample in samples if sample.log_probabilities]) for name, samples in runs]
    text = next((samples[-1].held_out for _, samples in usable if samples), None)
    if text is None:
        return None
    cells = text_cells(text.tokens)
    same = {name: [one for one in samples if _is_same(one.held_out, text)] for name, samples in usable}
    measured = [
        [_measured(f"{name}, " if len(runs) > 1 else "", sample, cells) for sample in spaced(samples, _most(len(runs)))]
        for name, samples in same.items()
        if samples
    ]
    last = measured[0][-1]
    differences = [other[-1].minus(last) for other in measured[1:2]]
    differences = differences or [last.minus(one) for one in measured[0][:-1][:1]]
    every = [one for of_run in measured for one in of_run]
    return render(
        "reporting/templates/heat_map.html",
        text=text,
        cells=[
            _shown(cell, text, last.values[at], [one.values[at] for one in differences])
            for at, cell in enumerate(cells)
        ],
        measured=every,
        labels=[last.label, *(one.label for one in differences)],
        strings=[css_string(f"\n{one.label}: ") for one in (last, *differences)],
        left_out=[(name, OTHER_TEXT if samples else NOT_RECORDED) for name, samples in usable if not same[name]],
        extremes=[(one.label, *_extremes(cells, one)) for one in differences],
        legend=[(bound, math.exp(-bound)) for bound in NATS],
        difference_nats=DIFFERENCE_NATS,
        data={
            "labels": [one.label for one in every],
            "values": [[None if value is None else round(100 * value) for value in one.values] for one in every],
            "nats": NATS,
            "difference": DIFFERENCE_NATS,
        },
    )


def css_string(text: str) -> "Markup":
    """Return a string for a style sheet, in which only letters and digits stand as they are."""
    from markupsafe import Markup

    signs = (one if one.isascii() and one.isalnum() else f"\\{ord(one):06x}" for one in text)
    return Markup('"' + "".join(signs) + '"')


def _most(runs: int) -> int:
    return max(2, MOST_CHECKPOINTS // runs)


def _is_same(one: HeldOutText | None, other: HeldOutText) -> bool:
    """Tell whether checkpoints predicted the same tokens, each from as many before it."""
    return one is not None and (one.ids, one.tokens, one.window) == (other.ids, other.tokens, other.window)


def _measured(prefix: str, sample: CheckpointSample, cells: list[TextCell]) -> Measured:
    known = [None, *(sample.log_probabilities or [])]  # nothing predicts the first token
    parts = [known[cell.first : cell.first + cell.count] for cell in cells]
    sums = [None if None in part else math.fsum(value for value in part if value is not None) for part in parts]
    return Measured(label=f"{prefix}step {sample.step:,}", values=sums, mean_nats=sample.mean_nats)


def _shown(
    cell: TextCell, text: HeldOutText, value: float | None, differences: list[float | None]
) -> dict[str, object]:
    """Return a cell as the page has it: its text, CSS classes, and words under the pointer with each view's value.

    Colours: p0 (expected) to p8; a1 to a5 where the first checkpoint is better, b1 to b5, z for equal; u for unknown.
    """
    levels = ["u" if value is None else f"p{sum(-value >= bound for bound in NATS)}"]
    values = ["not finite" if value is None else f"{value:.2f} nats, {_percent(math.exp(value))}"]
    for difference in differences:
        level = 0 if difference is None else sum(abs(difference) >= bound for bound in DIFFERENCE_NATS)
        levels.append("u" if difference is None else f"{'ab'[difference < 0]}{level}" if level else "z")
        values.append("not finite" if difference is None else f"{difference:+.2f} nats")
    starts_window = (cell.first - 1) % text.window == 0 and cell.first > 0
    kinds = [*([] if cell.kind == "text" else [cell.kind]), *(["w"] if starts_window else [])]
    return {
        "text": cell.text,
        "classes": " ".join([*(f"v{at}{level}" for at, level in enumerate(levels)), *kinds]),
        "about": _about(cell, text, starts_window=starts_window),
        "values": values if cell.first else [],
    }


def _about(cell: TextCell, text: HeldOutText, *, starts_window: bool) -> str:
    """Return the tokens of a cell, and how they were predicted."""
    tokens = f"token {cell.first}" if cell.count == 1 else f"tokens {cell.first} to {cell.first + cell.count - 1}"
    ids = ", ".join(str(each) for each in text.ids[cell.first : cell.first + cell.count])
    about = f"{cell.text.strip() or cell.text!r}  {tokens} of {len(text.ids) - 1}, id {ids}"
    if cell.first == 0:
        return f"{about}\nthe first token: not predicted"
    return about + (f"\nfirst of a window of {text.window}: predicted from one token" if starts_window else "")


def _extremes(cells: list[TextCell], view: Measured) -> list[list[tuple[str, str, float]]]:
    """Return (text before, text, difference) of the cells of greatest gain, and of those of greatest loss."""
    ordered = sorted((value, at) for at, value in enumerate(view.values) if value is not None)
    gains, losses = ordered[: -EXTREMES - 1 : -1], ordered[:EXTREMES]
    return [
        [
            (_joined(cells[max(0, at - CONTEXT_CELLS) : at]), cells[at].text, value)
            for value, at in chosen
            if value * sign > 0
        ]
        for chosen, sign in ((gains, 1), (losses, -1))
    ]


def _joined(cells: list[TextCell]) -> str:
    return "".join(cell.text for cell in cells).replace("\n", "")


def _percent(probability: float) -> str:
    return f"{probability:.1%}" if probability >= 0.001 else f"{probability:.1e}"
