"""The log of trials: a trial keeps its rule, each new trial gets a smaller level, and a gain raises the level again."""

import json
from pathlib import Path

import pytest

from common.errors import BadInput
from experiments.trial.trial_log import TRIALS, begin, finish, read_trials, rule_of
from experiments.trial.trial_rule import keep_level


def test_a_trial_keeps_its_rule(tmp_path: Path) -> None:
    number, rule = begin(tmp_path, "one", None, {"run": "runs/quickstart"})
    assert (number, rule.level) == (1, keep_level(1, 0))
    finish(tmp_path, "same", "same bits", "")  # this verdict needs no statistical test, so it does not count as a trial
    assert begin(tmp_path, "two", 4, {})[1].level == keep_level(2, 0)
    finish(tmp_path, "one", "better", "better by 0.1")
    finish(tmp_path, "one", "worse", "a second verdict")
    assert begin(tmp_path, "one", None, {}) == (1, rule)
    assert begin(tmp_path, "three", None, {})[1].level == keep_level(3, 1)
    finish(tmp_path, "two", "better", "")
    assert rule_of(read_trials(tmp_path), "four", None)[1].level == keep_level(4, 2) == 2 * keep_level(4, 1)
    lines = [json.loads(line) for line in (tmp_path / TRIALS).read_text().splitlines()]
    assert [(line["trial"], line.get("verdict")) for line in lines] == [
        *(("one", None), ("same", "same bits"), ("two", None), ("one", "better"), ("three", None), ("two", "better"))
    ]


def test_the_number_of_pairs_cannot_change(tmp_path: Path) -> None:
    begin(tmp_path, "one", 4, {})
    with pytest.raises(BadInput, match="--pairs 6: one was started with looks after 4 pairs; the number of"):
        begin(tmp_path, "one", 6, {})


LINE = {"trial": "two", "number": 2, "level": 0.001, "looks": [4]}


@pytest.mark.parametrize(
    "change",
    [
        *({"level": level} for level in (5, 0, -0.01, 0.06, float("nan"), float("inf"), True, "0.01", None)),
        *({"number": number} for number in (0, -1, 1.5, True, "2", None, 10**7)),
        *({"looks": looks} for looks in ([], [4, 4], [7, 4], [0], [4.0], [True], 4, None)),
        *({"trial": trial} for trial in ("", 3, None)),
        *({"verdict": verdict} for verdict in ("better", "good", 3)),
        {"level": None, "number": None, "looks": None, "verdict": "good"},
        {"level": None, "number": None, "looks": None},
    ],
)
def test_a_damaged_line_is_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object]
) -> None:
    begin(tmp_path, "one", 4, {})
    bad = {key: value for key, value in (LINE | change).items() if value is not None}
    with (tmp_path / TRIALS).open("a") as file:
        file.write(json.dumps(bad) + "\n")
    number, rule = begin(tmp_path, "two", 4, {})
    assert (number, rule.level) == (3, keep_level(3, 0))  # the damaged line may be the start of a trial
    path = tmp_path / TRIALS
    shown = capsys.readouterr().err
    assert f"{path}: skipped 1 damaged line, at line 2; each damaged line counts as a trial" in shown
    assert [line.number for line in read_trials(tmp_path).lines] == [1, 3]


def test_damaged_lines_never_raise_a_level(tmp_path: Path) -> None:
    for name in ("one", "two"):
        begin(tmp_path, name, 4, {})
    path = tmp_path / TRIALS
    path.write_text(path.read_text().replace('"one"', "3", 1) + '{"trial": "thr')
    assert begin(tmp_path, "four", 4, {})[0] == 4
    assert [line.number for line in read_trials(tmp_path).lines] == [2, 4]


def test_only_the_first_verdict_of_a_trial_counts(tmp_path: Path) -> None:
    for name in ("one", "two"):
        begin(tmp_path, name, 4, {})
    lines = [("one", "worse"), ("one", "better"), ("two", "better"), ("two", "better"), ("never begun", "better")]
    with (tmp_path / TRIALS).open("a") as file:
        file.writelines(json.dumps({"trial": name, "verdict": verdict}) + "\n" for name, verdict in lines)
    assert read_trials(tmp_path).gains == 1
