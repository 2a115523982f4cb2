"""Scores of fine-tuned answers are shown and never ranked."""

from pathlib import Path

from evaluation.comparison.compare import compare
from tests.evaluation.comparison.stored import instructed, rows_of


def test_fine_tuned_answers_are_shown_and_never_ranked(tmp_path: Path) -> None:
    homes = [
        instructed(tmp_path / "a", 21.5, 0.5, [1.25, 1.15]),  # 1.2, and 0.5 / sqrt(2) over seeds
        instructed(tmp_path / "b", 31.5, None, [1.2]),
        instructed(tmp_path / "c", 41.5, None, [None]),
    ]
    found = compare(rows_of(*homes))
    assert (found.columns, found.statements) == (["model", "chrF"], [])
    assert [row[1].text for row in found.rows] == ["21.50 ± 1.25", "31.50 ± 1.20", "41.50"]
    assert "± is a standard error over questions, and over fine-tuning seeds where there are several" in found.notes[0]
