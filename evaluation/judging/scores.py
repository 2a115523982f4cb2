"""From verdicts to numbers: scores with intervals, what position is worth, how much a judge agrees with itself."""

import math

import attrs
import numpy as np

from evaluation.judging.candidates import Panel
from evaluation.judging.prompt import Prompt
from evaluation.shared.bootstrap import paired_intervals
from evaluation.shared.intervals import Interval

GOOD_REFERENCE = 90  # a reference answer that scores less is doubtful, or the judge is


@attrs.frozen(kw_only=True)
class Standing:
    """One candidate's score over the questions that were judged."""

    title: str
    score: Interval
    spread: float | None  # standard deviation of its seeds' scores; None: one seed
    ranks: tuple[int, int] | None  # from best to worst, by what is told apart; None: one seed, which ranks no model


@attrs.frozen(kw_only=True)
class Scores:
    """What a session has found."""

    standings: list[Standing]  # in the panel's order
    differences: dict[tuple[int, int], Interval]  # of candidates a - b, by their numbers
    judged: int  # questions, with any seed
    anchor: float  # mean score of the reference answers
    doubtful: list[int]  # questions whose reference scored less than it should
    bias: list[tuple[float, float | None]]  # by position: what it adds to a score, and the standard error
    disagreement: float | None  # standard deviation of one answer's score between orders; None: one order


def score(panel: Panel, prompts: list[Prompt], verdicts: list[tuple[float, ...] | None]) -> Scores:
    """Return the scores. `verdicts`: by prompt, scores by position; None where there is none, which counts for nobody.

    At least one must be there.
    """
    cells = _cells(panel, prompts, verdicts)  # (M + 1, S, Q, K); the last one is the reference
    models = len(panel.candidates)
    means = _mean(cells, 3)  # (M + 1, S, Q)
    intervals, differences = paired_intervals(means[:models])
    of_seeds = _mean(means[:models], 2)  # (M, S)
    references = _mean(means[models], 0)  # (Q,)
    standings = [
        Standing(
            title=candidate.title,
            score=intervals[number],
            spread=_deviation(of_seeds[number]),
            ranks=_ranks(differences, number, models) if panel.slots > 1 else None,
        )
        for number, candidate in enumerate(panel.candidates)
    ]
    return Scores(
        standings=standings,
        differences=differences,
        judged=int((~np.isnan(references)).sum()),
        anchor=float(np.nanmean(references)),
        doubtful=[int(question) for question in np.flatnonzero(references < GOOD_REFERENCE)],
        bias=_bias(prompts, verdicts, cells),
        disagreement=_disagreement(cells[:models]),
    )


def _ranks(differences: dict[tuple[int, int], Interval], number: int, models: int) -> tuple[int, int]:
    better, worse = (_told_apart(differences, number, above=above) for above in (True, False))
    return 1 + better, models - worse


def _told_apart(differences: dict[tuple[int, int], Interval], number: int, *, above: bool) -> int:
    """Return how many candidates are surely better, or worse, than one."""
    sign = 1 if above else -1
    certain = [pair for pair, difference in differences.items() if difference.apart]
    return sum(
        (a == number and sign * differences[a, b].value < 0) or (b == number and sign * differences[a, b].value > 0)
        for a, b in certain
    )


def _cells(panel: Panel, prompts: list[Prompt], verdicts: list[tuple[float, ...] | None]) -> np.ndarray:
    """Return every score, float64 (M + 1, S, Q, K), NaN where there is none."""
    items = panel.slots * len(panel.questions)
    repeats = len(prompts) // items
    cells = np.full((len(panel.candidates) + 1, panel.slots, len(panel.questions), repeats), np.nan)
    for index, (prompt, verdict) in enumerate(zip(prompts, verdicts, strict=True)):
        if verdict is not None:
            cells[list(prompt.order), prompt.slot, prompt.question, index % repeats] = verdict
    return cells


def _bias(
    prompts: list[Prompt], verdicts: list[tuple[float, ...] | None], cells: np.ndarray
) -> list[tuple[float, float | None]]:
    """Return what each position adds to a score that the answer and the question do not explain."""
    of_answers = np.nanmean(cells, axis=(1, 2, 3))
    of_questions = _mean(np.moveaxis(cells, 2, 0).reshape(cells.shape[2], -1), 1)
    added: list[dict[int, list[float]]] = [{} for _ in range(len(cells))]  # by position and question
    for prompt, verdict in zip(prompts, verdicts, strict=True):
        if verdict is not None:
            for position, (answer, value) in enumerate(zip(prompt.order, verdict, strict=True)):
                expected = of_answers[answer] + of_questions[prompt.question] - of_answers.mean()
                added[position].setdefault(prompt.question, []).append(value - expected)
    result = []
    for by_question in added:
        means = np.array([np.mean(values) for values in by_question.values()])  # questions are what was drawn
        deviation = _deviation(means)
        result.append((float(means.mean()), None if deviation is None else deviation / math.sqrt(len(means))))
    return result


def _disagreement(cells: np.ndarray) -> float | None:
    """Return the standard deviation of an answer's score between orders, over all answers that have two."""
    number = (~np.isnan(cells)).sum(3)
    squares = np.nansum((cells - _mean(cells, 3)[..., None]) ** 2, axis=3)
    freedom = (number - 1)[number > 1].sum()
    return math.sqrt(squares[number > 1].sum() / freedom) if freedom else None


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Return means over what is there; NaN, without a warning, where nothing is."""
    number = (~np.isnan(values)).sum(axis)
    return np.divide(np.nansum(values, axis), number, out=np.full(number.shape, np.nan), where=number > 0)


def _deviation(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1)) if len(known) > 1 else None
