"""What people read of a judgement: free scores, standings, differences, and how far the judge can be trusted."""

import math

from tabulate import tabulate

from evaluation.instruct.overlap import FreeScores
from evaluation.judging.candidates import Panel
from evaluation.judging.scores import GOOD_REFERENCE, Scores
from evaluation.shared.intervals import Interval, plus_minus

CAVEAT = "Another judge can move all scores, and their order, by more than the intervals."
OF_SEEDS = "Intervals cover other questions and fine-tuning seeds of the same kind."
OF_ONE_SEED = (
    "Intervals cover other questions of the same kind, for this one fine-tuning only:\n"
    "another seed can move a difference by more, so no rank is given and no model is\n"
    "called better. instruct --seeds 2 or more is what tells."
)
MOST_DOUBTFUL = 3  # questions that are shown


def free_table(panel: Panel, free: list[list[FreeScores]]) -> str:
    """Return what needs no judge, a line for each candidate: means over its seeds. `free`: by candidate and seed."""
    rows = []
    for candidate, seeds in zip(panel.candidates, free, strict=True):
        losses = [seed.reference_loss for seed in seeds if seed.reference_loss is not None]
        rows.append(
            [
                candidate.title,
                len(seeds),
                f"{_average([seed.exact for seed in seeds]):.1%}",
                plus_minus(
                    _average([seed.chrf for seed in seeds]), _average_error([seed.chrf_error for seed in seeds]), 1
                ),
                plus_minus(_average(losses), _average_error([seed.reference_loss_error for seed in seeds]), 3)
                if len(losses) == len(seeds)
                else "",
            ]
        )
    return tabulate(rows, ["model", "seeds", "exact", "chrF", "reference loss"], disable_numparse=True)


def describe(panel: Panel, scores: Scores) -> str:
    """Return the scores, the differences, and what is known of the judge."""
    order = sorted(range(len(scores.standings)), key=lambda number: -scores.standings[number].score.value)
    several = panel.slots > 1
    rows = []
    for number in order:
        standing = scores.standings[number]
        row = [standing.title, _interval(standing.score)]
        if standing.ranks is not None:
            spread = "" if standing.spread is None else f"{standing.spread:.1f}"
            row = ["-".join(map(str, dict.fromkeys(standing.ranks))), *row, spread]
        rows.append(row)
    heads = ["rank", "model", "score", "between seeds"] if several else ["model", "score"]
    parts = [tabulate(rows, heads, disable_numparse=True)]
    if scores.differences:
        parts.append(
            tabulate(_differences(scores, order), ["difference", "", ""][: 2 + several], disable_numparse=True)
        )
    parts.append("\n".join(_trust(panel, scores)))
    return "\n\n".join(parts)


def _differences(scores: Scores, order: list[int]) -> list[list[str]]:
    """Return a row for each pair, the one with the higher score first; what is told apart only of several seeds."""
    rows = []
    for place, a in enumerate(order):
        for b in order[place + 1 :]:
            difference = scores.differences.get((a, b)) or -scores.differences[b, a]
            row = [f"{scores.standings[a].title} - {scores.standings[b].title}", _interval(difference, signed=True)]
            if scores.standings[a].ranks is not None:
                row.append("" if difference.apart else "not told apart")
            rows.append(row)
    return rows


def _trust(panel: Panel, scores: Scores) -> list[str]:
    lines = [f"reference answers, which the judge could not know from others: {scores.anchor:.1f}"]
    if scores.doubtful:
        lines.append(f"questions whose reference scored under {GOOD_REFERENCE}: {len(scores.doubtful)}, as")
        lines += [f"  {panel.questions[number].instruction[:100]!r}" for number in scores.doubtful[:MOST_DOUBTFUL]]
    bias = ", ".join(plus_minus(value, error, 1, signed=True) for value, error in scores.bias)
    lines.append(f"what a position adds, first to last: {bias}")
    if scores.disagreement is not None:
        lines.append(f"the same answer's score between orders: standard deviation {scores.disagreement:.1f}")
    return [*lines, OF_SEEDS if panel.slots > 1 else OF_ONE_SEED, CAVEAT]


def _interval(interval: Interval, *, signed: bool = False) -> str:
    form = "{:+.1f}" if signed else "{:.1f}"
    value = form.format(interval.value)
    if interval.low is None or interval.high is None:
        return value
    return f"{value} [{form.format(interval.low)}, {form.format(interval.high)}]"


def _average(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _average_error(errors: list[float | None]) -> float | None:
    """Return the error of a mean over seeds, whose errors are of the same questions: they do not average out."""
    known = [error for error in errors if error is not None]
    return _average(known) if known and len(known) == len(errors) else None
