"""Scores of a judgement: means with intervals, ranks, position bias, and the judge's disagreement with itself."""

import math

import attrs
import numpy as np

from evaluation.judging.panel import Panel
from evaluation.judging.prompt import Grade, Prompt
from evaluation.shared.significance import Interval, mean_and_error, two_way_intervals

GOOD_REFERENCE = 90  # a reference answer with a lower score is doubtful, or the judge is


@attrs.frozen(kw_only=True)
class Standing:
    """One candidate's score over the questions that were judged."""

    title: str
    score: Interval
    spread: float | None  # standard deviation of its seeds' scores; None: one seed
    ranks: tuple[int, int] | None  # best and worst that the intervals allow; None: one seed, which gives no rank


@attrs.frozen(kw_only=True)
class Scores:
    """Scores of all candidates, and diagnostics of the judge."""

    standings: list[Standing]  # in the panel's order
    differences: dict[tuple[int, int], Interval]  # of candidates a - b, by their numbers
    anchor: float  # mean score of the reference answers
    doubtful: list[int]  # questions whose reference scored below GOOD_REFERENCE
    bias: list[tuple[float, float | None]]  # by position: what it adds to a score, and the standard error
    disagreement: float | None  # standard deviation of one answer's score between orders; None: one order


def score(panel: Panel, prompts: list[Prompt], verdicts: list[list[Grade] | None]) -> Scores:
    """Return the scores of verdicts by prompt, at least one; None is left out for all candidates alike."""
    cells = _cells(panel, prompts, verdicts)  # (M + 1, S, Q, K): models, seeds, questions, orders; the reference last
    models = len(panel.candidates)
    means = cells.mean(3)  # (M + 1, S, Q)
    intervals, differences = two_way_intervals(means[:models].filled(np.nan))
    of_seeds = means[:models].mean(2)  # (M, S)
    references = means[models].mean(0)  # (Q,)
    standings = [
        Standing(
            title=title,
            score=intervals[number],
            spread=_deviation(of_seeds[number].compressed()),
            ranks=_ranks(differences, number, models) if panel.slots > 1 else None,
        )
        for number, title in enumerate(panel.titles)
    ]
    return Scores(
        standings=standings,
        differences=differences,
        anchor=float(references.mean()),
        doubtful=np.flatnonzero((references < GOOD_REFERENCE).filled(False)).tolist(),
        bias=_position_bias(prompts, cells),
        disagreement=_disagreement(cells[:models]),
    )


def _cells(panel: Panel, prompts: list[Prompt], verdicts: list[list[Grade] | None]) -> np.ma.MaskedArray:
    """Return every score, float64 (M + 1, S, Q, K), masked where there is none."""
    repeats = len(prompts) // (panel.slots * len(panel.questions))
    cells = np.full((len(panel.candidates) + 1, panel.slots, len(panel.questions), repeats), np.nan)
    for index, (prompt, verdict) in enumerate(zip(prompts, verdicts, strict=True)):
        if verdict is not None:
            place = prompt.slot, prompt.question, index % repeats
            cells[(list(prompt.order), *place)] = [grade.score for grade in verdict]
    return np.ma.masked_invalid(cells)


def _ranks(differences: dict[tuple[int, int], Interval], number: int, models: int) -> tuple[int, int]:
    """Return the best and the worst rank: those that are surely better or worse are counted."""
    ours = [one if a == number else -one for (a, b), one in differences.items() if number in (a, b) and one.apart]
    return 1 + sum(one.value < 0 for one in ours), models - sum(one.value > 0 for one in ours)


def _position_bias(prompts: list[Prompt], cells: np.ma.MaskedArray) -> list[tuple[float, float | None]]:
    """Return the effect of each position on a score beyond the means of the answer and the question."""
    answers, slots, questions, repeats = cells.shape
    of_answers = cells.mean((1, 2, 3))
    of_questions = np.moveaxis(cells, 2, 0).reshape(questions, -1).mean(1)
    added = np.ma.masked_all((answers, questions, slots, repeats))  # by position
    for index, prompt in enumerate(prompts):
        order, slot, question, repeat = list(prompt.order), prompt.slot, prompt.question, index % repeats
        expected = of_answers[order] + of_questions[question] - of_answers.mean()
        added[:, question, slot, repeat] = cells[order, slot, question, repeat] - expected
    result = []
    for row in added.reshape(answers, questions, -1).mean(2):
        result.append(mean_and_error(row.compressed()))  # the questions are the sample
    return result


def _disagreement(cells: np.ma.MaskedArray) -> float | None:
    """Return the standard deviation of an answer's score between orders, over all answers with at least two."""
    squares = ((cells - cells.mean(3)[..., None]) ** 2).sum(3)
    count = cells.count(3)
    freedom = (count - 1)[count > 1].sum()
    return math.sqrt(squares[count > 1].sum() / freedom) if freedom else None


def _deviation(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1)) if len(values) > 1 else None
