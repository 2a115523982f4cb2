"""Accuracies are compared item by item."""

from pathlib import Path

from evaluation.comparison.compare import compare
from tests.evaluation.comparison.stored import hellaswag, rows_of


def test_items_are_compared_one_by_one(tmp_path: Path) -> None:
    a = hellaswag(tmp_path / "a", set(range(300)))
    b = hellaswag(tmp_path / "b", set(range(330)))  # right wherever a is
    c = hellaswag(tmp_path / "c", set(range(400, 730)))
    found = compare(rows_of(a, b))
    # 30 of 1000 differ, and one half more each way: 0.03 ± t * sqrt((31 / 1002 - (30 / 1002)**2) / 1001)
    told = "HellaSwag, completion: a is below b by 0.0300 [0.0192, 0.0408] of all items; no winner"
    assert any(line.startswith(told) for line in found.statements)
    apart = compare(rows_of(a, c)).statements
    assert any("a and c do not differ significantly: -0.0300" in line for line in apart)  # the same means, other items
    row = dict(zip(found.columns, (cell.text for cell in found.rows[0]), strict=True))
    assert row["HellaSwag, completion"] == "0.3000 ± 0.0150"
    assert [row[0].text for row in found.rows[2:]] == ["OpenAI GPT-2 small, published", "OpenAI GPT-2 XL, published"]


def test_without_an_item_on_which_two_models_disagree_the_interval_still_has_a_width(tmp_path: Path) -> None:
    homes = [hellaswag(tmp_path / name, set(range(300))) for name in "ab"]
    told = "HellaSwag, completion: a and b do not differ significantly: 0.0000 [-0.0020, 0.0020] of all items"
    assert told in compare(rows_of(*homes)).statements
