"""The sections about checkpoints in a report: continuations of prompts, and the heat map of a held-out text."""

import math
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from markupsafe import Markup

from common.output import Notice
from common.web_page import HEAT_LEGEND, HEAT_NATS, render
from reporting.run_history import run_names
from reporting.samples.sample_log import CheckpointSample, HeldOutText, read_samples, record_samples, spaced
from tokens.tokenizer.tokenizer import END_OF_TEXT
from training.supervision.run_lock import is_locked

MOST_SHOWN = 12  # largest number of checkpoints in the gallery; samples.jsonl has all of them
MOST_LISTED = 40  # largest number of checkpoints whose means are listed, for all runs together
DIFFERENCE_NATS = (0.05, 0.2, 0.5, 1.0, 2.0)  # the smallest difference for each color, in both directions
# Reasons for leaving out a run.
NOT_RECORDED = "no log-probabilities are recorded for it"
OTHER_TEXT = "it was measured on another text, with another tokenizer or with another context length"
NAMED = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍", " ": " "}

Checkpoint: TypeAlias = tuple[str, CheckpointSample]  # a label and the samples
Values: TypeAlias = Sequence[float | None]  # the nats of each token; None: not predicted, or not finite


def sample_sections(runs: Sequence[Path], *, record: bool) -> tuple[dict[str, Markup], list[str | Notice]]:
    """Return the sections by title, and notes. If `record`, record missing samples first.

    Raise BadInput if a sample log cannot be read.
    """
    notes: list[str | Notice] = [note for run in runs for note in record_samples(run)] if record else []
    samples = []
    for name, run in zip(run_names(runs), runs, strict=True):
        run_samples, lines = read_samples(run)
        samples.append((name, run_samples))
        notes += lines.notes(growing=is_locked(run))
    missing = render("reporting/templates/missing_samples.html", notes=notes) if notes else None
    parts = {"Samples": gallery(samples), "Log-probabilities": heat_map(samples), "Missing samples": missing}
    return {title: html for title, html in parts.items() if html is not None}, notes


def gallery(runs: Sequence[tuple[str, Sequence[CheckpointSample]]]) -> Markup | None:
    """Return the continuations of named runs as HTML, by prompt, or None if there are none."""
    checkpoints_by_run = [
        _labelled(name, [sample for sample in samples if sample.said], len(runs)) for name, samples in runs
    ]
    rows = [row for checkpoints in checkpoints_by_run for row in spaced(checkpoints, max(2, MOST_SHOWN // len(runs)))]
    if not rows:
        return None
    return render(
        "reporting/templates/gallery.html",
        prompts=list(dict.fromkeys(answer.prompt for _, sample in rows for answer in sample.said)),
        rows=rows,
        problems=[(name, sample) for name, samples in runs for sample in samples if sample.problem],
        count=sum(len(samples) for _, samples in runs),
    )


def heat_map(runs: Sequence[tuple[str, Sequence[CheckpointSample]]]) -> Markup | None:
    """Return the heat map of named runs as HTML, or None if there is nothing to show.

    It has two views: the last checkpoint of the first run that has a text, and a difference. With a second run on the
    same text, the difference is between the last checkpoints of both runs. Otherwise, it is between the last and the
    first checkpoint of the first run. A text next to the map says which runs are left out, and why.
    """
    usable = {name: [sample for sample in samples if sample.log_probabilities] for name, samples in runs}
    text = next((samples[-1].held_out for samples in usable.values() if samples), None)
    if text is None:
        return None
    comparable = {
        name: [sample for sample in samples if _is_same(sample.held_out, text)] for name, samples in usable.items()
    }
    first, *more_runs = [_labelled(name, samples, len(runs)) for name, samples in comparable.items() if samples]
    views = [(first[-1][0], _values(first[-1]))]
    if more_runs or len(first) > 1:
        views.append(_difference(more_runs[0][-1], first[-1]) if more_runs else _difference(first[-1], first[0]))
    return render(
        "reporting/templates/heat_map.html",
        text=text,
        labels=[label for label, _ in views],
        cells=[cell(text, at, [values[at] for _, values in views]) for at in range(len(text.ids))],
        left_out=[(name, OTHER_TEXT if usable[name] else NOT_RECORDED) for name in comparable if not comparable[name]],
        legend=HEAT_LEGEND,
        difference_nats=DIFFERENCE_NATS,
        means=[
            (label, sample.mean_nats)
            for checkpoints in (first, *more_runs)
            for label, sample in spaced(checkpoints, max(2, MOST_LISTED // len(runs)))
        ],
    )


def token_text(token: str, *, special: bool = False) -> tuple[str, str]:
    """Return how the page shows a token, and its kind: "text", "space", "bytes" (not UTF-8) or "end".

    `token` has the token's bytes, decoded as Latin-1. "end" is a special token, such as the end of a text or of a turn;
    logs of older versions have "" for the end of a text.
    """
    content = token.encode("latin-1")
    if not content:
        return END_OF_TEXT, "end"
    if special:
        return "".join(map(_visible, content.decode(errors="replace"))), "end"
    try:
        shown = "".join(map(_visible, content.decode()))
    except UnicodeDecodeError:
        return content.hex(" ").upper(), "bytes"
    return (shown, "text") if content.decode().strip() else (shown.replace(" ", "·"), "space")


def _labelled(name: str, samples: Sequence[CheckpointSample], runs: int) -> list[Checkpoint]:
    return [(f"{name}, step {sample.step:,}" if runs > 1 else f"step {sample.step:,}", sample) for sample in samples]


def _is_same(text: HeldOutText | None, reference: HeldOutText) -> bool:
    """Return whether two texts have the same tokens and windows, so that their predictions can be compared."""
    if text is None or (text.ids, text.window) != (reference.ids, reference.window):
        return False
    # Older versions stored "" for each special token.
    return all(a == b or "" in (a, b) for a, b in zip(text.tokens, reference.tokens, strict=True))


def _values(checkpoint: Checkpoint) -> Values:
    return [None, *(checkpoint[1].log_probabilities or [])]  # nothing predicts the first token


def _difference(first: Checkpoint, second: Checkpoint) -> tuple[str, Values]:
    pairs = zip(_values(first), _values(second), strict=True)
    values = [None if a is None or b is None else a - b for a, b in pairs]
    return f"{first[0]} against {second[0]}", values


def cell(text: HeldOutText, at: int, values: Values) -> dict[str, str]:
    """Return what the page needs to show a token: its text, CSS classes, and a description with the value in each view.

    The color classes are p0 (expected) to p8, and, for a difference, a1 to a5 if the first checkpoint is better and b1
    to b5 if it is worse.
    """
    shown, kind = token_text(text.tokens[at], special=text.ids[at] in text.special)
    if not text.tokens[at] and len({token for token, name in zip(text.ids, text.tokens, strict=True) if not name}) > 1:
        shown = f"<|id {text.ids[at]}|>"  # older versions did not record the names of turn tokens
    starts_window = (at - 1) % text.window == 0 and at > 0
    about = [f"{shown.strip() or repr(shown)}  token {at} of {len(text.ids) - 1}, id {text.ids[at]}"]
    about += ["not predicted: no token comes before it"] if at == 0 else []
    about += [f"first in a window of {text.window} tokens: predicted from one token"] if starts_window else []
    classes = [*([] if kind == "text" else [kind]), *(["w"] if starts_window else [])]
    for view, value in enumerate(values if at else ()):
        if value is None:
            about.append("not finite")
        elif view == 0:
            classes.append(f"p{sum(-value >= bound for bound in HEAT_NATS)}")
            probability = math.exp(value)
            about.append(f"{value:.2f} nats, {probability:{'.1%' if probability >= 0.001 else '.1e'}}")
        else:
            classes.append(f"{'ab'[value < 0]}{sum(abs(value) >= bound for bound in DIFFERENCE_NATS)}")
            about.append(f"difference {value:+.2f} nats")
    return {"text": shown, "classes": " ".join(classes), "about": "\n".join(about)}


def _visible(character: str) -> str:
    if character in NAMED:
        return NAMED[character]
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))  # Unicode's symbol for this control character
    invisible = unicodedata.category(character)[0] in "CZ" or unicodedata.combining(character)
    return f"⟨U+{ord(character):04X}⟩" if invisible else character
