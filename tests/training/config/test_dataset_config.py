"""`dataset` of train.json: a name, or a list with weights that change by step."""

from typing import Any

import pytest

from training.config.dataset_config import MOST_STAGES, read_parts, shares


def test_a_name_is_one_dataset_with_all_of_the_weight() -> None:
    parts = read_parts("tokens/web")
    assert [(part.dataset, part.weights) for part in parts] == [("tokens/web", ((0, 1),))]
    assert shares(parts) == [(0, (1,))]


def test_shares_are_whole_numbers_wherever_a_weight_changes() -> None:
    parts = read_parts(
        [
            {"dataset": "web", "weight": 0.5},
            {"dataset": "code", "weight": [[0, 0.25], [100, 0.5]]},
            {"dataset": "books", "weight": [[0, 0], [300, 1]]},
        ]
    )
    assert shares(parts) == [(0, (2, 1, 0)), (100, (1, 1, 0)), (300, (1, 1, 2))]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "dataset: got '', wanted a non-empty string, or a list of"),
        ([], r"dataset: got \[\], wanted"),
        ([{"dataset": "a", "weight": 0}], "dataset: entry 1: weight: got 0, wanted a number above 0, or stages"),
        ([{"dataset": "a", "weight": True}], "weight: got True, wanted a number above 0"),
        ([{"dataset": "a", "weight": [[5, 1]]}], "wanted the first one to begin with step 0"),
        ([{"dataset": "a", "weight": [[0, 1], [0, 2]]}], r"got stage \[0, 2\], wanted \[first step, weight\], steps"),
        ([{"dataset": "a", "weight": [[0, 0]]}], "dataset: entry 1: got weight 0 for a in every stage"),
        ([{"dataset": "a", "weight": 1}, {"dataset": "a", "weight": 1}], "entry 2: got a twice"),
        ([{"dataset": "a", "weight": [[0, 1], [9, 0]]}], "got no weight above 0 from step 9 on"),
        ([{"dataset": "a", "weight": [[n, 1] for n in range(MOST_STAGES + 1)]}], "513 datasets and stages in all"),
    ],
)
def test_a_wrong_value_is_told_with_its_entry(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_parts(value)
