"""Scores that need no judge are means with standard errors. Unknown errors are left out."""

import math
from pathlib import Path

import pytest

from evaluation.comparison.compare import compare
from evaluation.instruct.reference_scores import ReferenceScores, reference_scores
from evaluation.shared.records import Answer, Answers, Record
from tests.evaluation.comparison.stored import instructed, rows_of


def scores(*answers: tuple[str, str, float | None]) -> ReferenceScores:
    """Return the scores of answers. Each argument has an answer, its reference, and the loss of the reference."""
    rows = [
        Answer(record=Record(instruction="Say it.", input="", output=reference), text=text, reference_loss=loss)
        for text, reference, loss in answers
    ]
    return reference_scores(Answers(model="run", seed=0, home=None, settings={}, answers=rows))


def test_scores_are_means_over_questions() -> None:
    result = scores((" a b c d e f\n", "a b c d e f", 1.0), ("x", "a b c d e f", 2.0), ("x", "a b c d e f", 4.0))
    assert result.exact == pytest.approx(1 / 3)
    assert result.chrf == pytest.approx(100 / 3)
    # The error is the standard deviation of (100, 0, 0), divided by the square root of 3.
    assert result.chrf_error == pytest.approx(100 / 3)
    assert result.reference_loss == pytest.approx(7 / 3)
    assert result.reference_loss_error == pytest.approx(math.sqrt(7 / 3 / 3))
    alone = scores(("a", "b", 1.5))
    assert (alone.chrf_error, alone.reference_loss, alone.reference_loss_error) == (None, 1.5, None)
    assert scores(("a", "b", None), ("a", "b", 2.0)).reference_loss is None


def test_fine_tuned_answers_are_shown_and_never_ranked(tmp_path: Path) -> None:
    homes = [
        instructed(tmp_path / "a", 21.5, 0.5, [1.25, 1.15]),  # errors: 1.2 over questions, 0.5 / sqrt(2) over seeds
        instructed(tmp_path / "b", 31.5, None, [1.2]),
        instructed(tmp_path / "c", 41.5, None, [None]),
    ]
    comparison = compare(rows_of(*homes))
    assert (comparison.columns, comparison.statements) == (["model", "chrF"], [])
    assert [row[1].text for row in comparison.rows] == ["21.50 ± 1.25", "31.50 ± 1.20", "41.50"]
    assert (
        "± is a standard error over questions, and over fine-tuning seeds if there are several" in comparison.notes[0]
    )


def test_closer_answers_score_more() -> None:
    reference = "The author of Pride and Prejudice is Jane Austen."
    same, close, far, nothing = (
        scores((text, reference, None))
        for text in (f" {reference}\n", reference.replace("Jane Austen", "Sarah Palin"), "Blue.", "")
    )
    assert (same.exact, close.exact) == (1, 0)
    assert same.chrf == pytest.approx(100)
    assert 50 < close.chrf < 100 and nothing.chrf == 0 < far.chrf < 10
