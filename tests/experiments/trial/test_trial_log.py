"""Log of trials: a trial keeps the rule it began with, each new one gets a smaller level, a gain gives some back."""

import json
from pathlib import Path

import pytest

from common.errors import BadInput
from experiments.trial.trial_log import TRIALS, begin, finish, read_trials, rule_of
from experiments.trial.trial_rule import keep_level


def test_a_trial_keeps_its_rule_and_the_next_one_counts_it(tmp_path: Path) -> None:
    number, rule = begin(tmp_path, "one", None, {"run": "runs/quickstart"})
    assert (number, rule.level) == (1, keep_level(1, 0))
    finish(tmp_path, "same", "same bits", "")  # needs no test, and counts for none
    assert begin(tmp_path, "two", 4, {})[1].level == keep_level(2, 0)
    finish(tmp_path, "one", "better", "better by 0.1")
    finish(tmp_path, "one", "worse", "said twice")
    assert begin(tmp_path, "one", None, {}) == (1, rule)
    assert begin(tmp_path, "three", None, {})[1].level == keep_level(3, 1)
    finish(tmp_path, "two", "better", "")
    assert rule_of(read_trials(tmp_path), "four", None)[1].level == keep_level(4, 2) == 2 * keep_level(4, 1)
    lines = [json.loads(line) for line in (tmp_path / TRIALS).read_text().splitlines()]
    assert [(line["trial"], line.get("verdict")) for line in lines] == [
        *(("one", None), ("same", "same bits"), ("two", None), ("one", "better"), ("three", None), ("two", "better"))
    ]


def test_other_pairs_than_those_begun_with_are_refused(tmp_path: Path) -> None:
    begin(tmp_path, "one", 4, {})
    with pytest.raises(BadInput, match="--pairs 6: one has begun with looks after 4 pairs; their number is stated"):
        begin(tmp_path, "one", 6, {})


def test_a_damaged_line_is_named_and_counted_by_those_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        begin(tmp_path, name, 4, {})
    path = tmp_path / TRIALS
    path.write_text(path.read_text().replace('"one"', "3", 1) + '{"trial": "thr')
    assert begin(tmp_path, "four", 4, {})[0] == 3
    assert "left out as damaged: 2 lines, from line 1 on" in capsys.readouterr().err
    assert [line.number for line in read_trials(tmp_path)] == [2, 3]
