"""The result log is append-only, and read by model and kind."""

from pathlib import Path

import pytest

from common.errors import BadInput
from evaluation.shared.results import append_result, is_newest, read_results, results_of


def test_results_are_found_by_model_and_kind_oldest_first(tmp_path: Path) -> None:
    for model, kind, value in (("a", "loss", 1), ("b", "loss", 2), ("a", "smoke", 3), ("a", "loss", 4)):
        append_result(tmp_path / "new", model, kind, {"value": value})
    assert [result["value"] for result in results_of(tmp_path / "new", "a", "loss")] == [1, 4]
    assert [result["value"] for result in read_results(tmp_path / "new")] == [1, 2, 3, 4]
    assert read_results(tmp_path / "absent") == []


def test_the_newest_result_is_told_from_older_ones(tmp_path: Path) -> None:
    append_result(tmp_path, "a", "loss", {"value": (1, 2)})
    assert is_newest(tmp_path, "a", "loss", {"value": (1, 2)})  # a tuple is read back as a list
    assert not is_newest(tmp_path, "b", "loss", {"value": (1, 2)})
    append_result(tmp_path, "a", "loss", {"value": 3})
    assert not is_newest(tmp_path, "a", "loss", {"value": (1, 2)})


def test_a_result_that_cannot_be_stored_is_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").mkdir()
    with pytest.raises(BadInput, match=r'cannot be written: .*; the result is \{"evaluation": "loss"'):
        append_result(tmp_path, "a", "loss", {"value": 1})
