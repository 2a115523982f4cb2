"""Published values stand only beside results on the same data."""

from pathlib import Path

from evaluation.comparison.compare import compare
from evaluation.loss.loss_measures import GPJT_RANGE
from tests.evaluation.comparison.stored import hellaswag, judged, losses_on, rows_of


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
