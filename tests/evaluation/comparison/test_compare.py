"""Comparison shows what models share, and compares results on the same data only."""

from pathlib import Path

from evaluation.comparison.compare import compare
from tests.evaluation.comparison.stored import hellaswag, judged, losses_on, rows_of


def test_what_most_models_share_is_shown_rather_than_what_is_newest(tmp_path: Path) -> None:
    a, b = hellaswag(tmp_path / "a", {1}), hellaswag(tmp_path / "b", {1})
    hellaswag(b, {1, 2}, items=2000)
    found = compare(rows_of(a, b))
    assert found.statements[0].startswith("HellaSwag, completion: a and b do not differ significantly: 0.0000")


def test_scores_of_other_sessions_are_shown_apart_and_never_compared(tmp_path: Path) -> None:
    clear = [{"a": "a", "b": "b", "value": -4.0, "low": -7.0, "high": -1.0}]
    a, b = judged(tmp_path / "a", [20, 17, 23], clear), judged(tmp_path / "b", [24, 21, 27], clear)
    c = judged(tmp_path / "c", [90, 85, 95], [{"a": "c", "b": "d", "value": 50, "low": 40, "high": 60}])
    found = compare(rows_of(c, b, a))
    told = "b is above a by 4.00 [1.00, 7.00] points; no winner: the seed noise is unknown"
    assert found.statements == [f"judge's score: {told}"]
    shown = {row[0].text: row[-1].text for row in found.rows}
    assert shown["b"] == "24.00 [21.00, 27.00]"
    assert shown["c"] == "90.00 [85.00, 95.00] [a]"
    assert shown["OpenAI GPT-2 medium, published"] == "38.53 [1]"
    assert any(note.startswith("[a] not comparable with the others: judge: 110 questions") for note in found.notes)


def test_a_session_with_prompts_left_out_does_not_take_the_place_of_a_whole_one(tmp_path: Path) -> None:
    whole = [{"a": "a", "b": "b", "value": -4.0, "low": -7.0, "high": -1.0}]
    half = [{"a": "a", "b": "b", "value": 9.0, "low": 8.0, "high": 10.0}]
    homes = [judged(tmp_path / name, [20, 17, 23], whole, left_out=0) for name in "ab"]
    for home in homes:
        judged(home, [50, 47, 53], half, left_out=144, time="2999-01-01T00:00:00+00:00")
    found = compare(rows_of(*homes))
    assert "by 4.00" in found.statements[0]
    told = "judge: a newer session of judge-1, 2999-01-01T00:00:00+00:00, is not shown: 144 prompts were left out of it"
    assert found.notes.count(told) == 1
    alone = [judged(tmp_path / name, [50, 47, 53], half, left_out=144) for name in "cd"]
    notes = compare(rows_of(*alone)).notes
    assert any("144 prompts of which were left out for all models alike" in note for note in notes)


def test_columns_are_in_the_order_of_the_registry_whatever_was_measured_first(tmp_path: Path) -> None:
    home = judged(tmp_path / "a", [20, 17, 23], [])
    losses_on(hellaswag(home, {1}))
    shown = ["held-out loss", "bits/byte", "HellaSwag, completion", "judge's score"]
    assert compare(rows_of(home)).columns == ["model", *shown]
