"""The key `dataset` of train.json: one name, or several datasets with weights that may change during the run."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_run
from training.config.batch_plan import make_plan
from training.config.dataset_config import read_parts, shares
from training.config.train_config import load_run


def part(dataset: str = "a", **keys: Any) -> dict[str, Any]:
    return {"dataset": dataset} | keys


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "got '', wanted a non-empty string, or a list of {\"dataset\": NAME"),
        ([], "got [], wanted a non-empty string, or a list of"),
        (["a"], "entry 1: got 'a', wanted an object of keys and values"),
        ([part(wieght=1)], "entry 1: unknown key 'wieght'; did you mean 'weight'?"),
        ([part()], "entry 1: key 'weight' is missing"),
        ([part("", weight=1)], "entry 1: dataset: got '', wanted a non-empty string"),
        ([part("b", weight=1), part(weight=0)], "entry 2: weight: got 0, wanted a number above 0, or stages"),
        ([part(weight="1")], "entry 1: weight: got '1', wanted a number above 0, or stages"),
        ([part(weight=True)], "entry 1: weight: got True, wanted a number above 0"),
        ([part(weight=1), part(weight=2)], "entry 2: a is listed twice; list it once, with the sum of the weights"),
        ([part(weight=[])], "entry 1: weight: got stages [], wanted a first stage that starts at step 0"),
        ([part(weight=[[1, 1]])], "entry 1: weight: got stages [[1, 1]], wanted a first stage that starts at step 0"),
        ([part(weight=[[0, 1], [0, 2]])], "entry 1: weight: got stage [0, 2], wanted [first step, weight] with rising"),
        ([part(weight=[[0, -1]])], "entry 1: weight: got stage [0, -1], wanted [first step, weight]"),
        ([part(weight=[[True, 1]])], "entry 1: weight: got stage [True, 1], wanted [first step, weight]"),
        ([part(weight=[[0, 1], [5, 0]])], "all weights are 0 from step 5 on; at least one must be above 0"),
        ([part(weight=[[0, 0]]), part("b", weight=1)], "entry 1: a has weight 0 in every stage; remove it or give it"),
        ([part(weight=1e-9), part("b", weight=1)], "round the weights to fewer digits"),
        ([part(weight=1e-40), part("b", weight=1e38)], "round the weights to fewer digits"),
        ([part(weight=1e-320)], "entry 1: weight: got 1e-320"),
        ([part(weight=10**400)], "entry 1: weight: got 1000"),
        ([part(str(n), weight=1) for n in range(5000)], "got 5,000 datasets and stages in total, wanted at most 512"),
        ([part(weight=[[n, 1] for n in range(5000)])], "got 5,000 datasets and stages in total, wanted at most 512"),
    ],
)
def test_invalid_datasets_are_reported_in_one_line(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_parts(value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_datasets_may_change_weights_at_different_steps(tmp_path: Path) -> None:
    parts = [part(weight=[[0, 0.7], [1000, 0]]), part("b", weight=0.3), part("c", weight=[[0, 0], [500, 1]])]
    run = load_run(write_run(tmp_path / "r", Path("x"), dataset=parts), [])
    assert shares(run.train.data.parts) == [(0, (7, 3, 0)), (500, (7, 3, 10)), (1000, (0, 3, 10))]
    plan = make_plan(run.train, run.model.context_length, 1)
    assert [source.sequences for source in plan.sources] == [45, 19, 0]  # the first stage has 64 sequences
    longer = make_plan(run.train.replace(min_train_tokens=600 * 8 * 32), run.model.context_length, 1)
    assert [source.sequences for source in longer.sources] == [2800 + 280, 1200 + 120, 400]
