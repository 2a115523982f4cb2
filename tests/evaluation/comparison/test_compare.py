"""Comparison shows what models share, and compares results, published values too, on the same data only."""

from pathlib import Path

from evaluation.comparison.compare import compare
from evaluation.loss.loss_measures import GPJT_RANGE
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


def test_published_losses_stand_only_beside_losses_of_the_same_tokens(tmp_path: Path) -> None:
    same = losses_on(tmp_path / "a", **GPJT_RANGE)
    other = hellaswag(losses_on(tmp_path / "b", **GPJT_RANGE | {"start": 0}), {1})
    found = [compare(rows_of(home)) for home in (same, other)]
    published = [{row[0].text: row[1].text for row in one.rows[1:]} for one in found]
    assert published[0]["OpenAI GPT-2 medium, published"] == "3.231 [1]"
    assert published[1] == {"OpenAI GPT-2 small, published": "", "OpenAI GPT-2 XL, published": ""}  # of HellaSwag
    assert not any("left out" in note for note in found[0].notes)
    assert any(note.startswith("Published losses of OpenAI's GPT-2 are left out") for note in found[1].notes)


def test_sources_are_numbered_as_they_are_used_and_nothing_is_ranked_by_them(tmp_path: Path) -> None:
    home = judged(hellaswag(losses_on(tmp_path / "a", **GPJT_RANGE), {1}), [20, 17, 23], [])
    found = compare(rows_of(home))
    rows = {row[0].text: dict(zip(found.columns, row, strict=True)) for row in found.rows}
    small = rows["OpenAI GPT-2 small, published"]
    assert small["held-out loss"].text == "3.500 [1]"
    assert small["HellaSwag, completion"].text == "0.2955 [2]"
    assert small["judge's score"].text == "22.98 [3]"
    assert small["held-out loss"].bounds is None
    assert sum(note.startswith(("[1] ", "[2] ", "[3] ")) for note in found.notes) == 3
    assert any("Published values have no interval" in note for note in found.notes)
    assert not any("published" in line for line in found.statements)
