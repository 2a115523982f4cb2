"""`--plan` shows forecast.json as long as the recipe is the same as when the forecast was made."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from tests.conftest import ROOT, train
from training.config.train_config import load_run
from training.planning.forecast_file import FORECAST, describe_forecast_file, forecast_recipe

POINT = {"parameters": 100, "tokens": 1000, "loss": 4.0}


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    for name in ("model.json", "train.json"):
        (tmp_path / name).write_bytes((ROOT / "runs" / "speedrun-8xh100" / name).read_bytes())
    record = {
        "date": "2026-11-23",
        "commit": "abc1234",
        "target": {"loss": 3.28, "low": 3.25, "high": 3.31, "extrapolation": 12.34},
        "points": [{"rung": "12x768", **POINT}] * 12,
        "held_out": {"error": 0.004},
        "recipe": forecast_recipe(load_run(tmp_path, [])),
    }
    (tmp_path / FORECAST).write_text(json.dumps(record))
    return tmp_path


def change(run: Path, **values: Any) -> None:
    path = run / FORECAST
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_plan_ends_with_the_forecast(run: Path) -> None:
    options = ("--plan", "--machine", "8xh100-80gb")
    lines = train(run, *options).stdout.splitlines()
    assert " ".join(line.strip() for line in lines[-4:]) == (
        "forecast     loss 3.2800 [3.2500, 3.3100], 90% interval for a single run, at 12.3 x the compute of the "
        "ladder's largest run ladder of 12 runs, 2026-11-23, commit abc1234: a forecast of the largest size from "
        "the smaller sizes was off by 0.4% on average"
    )
    (run / FORECAST).unlink()
    assert train(run, *options).stdout.splitlines() == lines[:-4]


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("learning_rate=0.004", "train.json: learning_rate is 0.004, but was 0.0036 when the forecast was made; run"),
        ("min_train_tokens=1000000000", "train.json: min_train_tokens is 1000000000, but was 2400190464 when"),
        ("model.n_layers=24", "model.json: n_layers is 24, but was 12 when"),
        ("validation_sequences=64", "train.json: validation_sequences is 64, but was 10240 when the"),
        ("start_val_token=1", "train.json: start_val_token is 1, but was 0 when the"),
        ("dataset=other", "train.json: dataset is 'other', but was 'kjj0/fineweb10B-gpt2' when"),
    ],
)
def test_changed_recipe_names_the_key_instead_of_the_loss(run: Path, override: str, change: str) -> None:
    [line] = describe_forecast_file(load_run(run, [override]))
    assert line.startswith("forecast     not for this run: ") and change in line


@pytest.mark.parametrize("override", ["microbatch_size=32", "random_seed=7", "parallel=fsdp", "checkpoint_interval=9"])
def test_other_keys_do_not_change_the_forecast(run: Path, override: str) -> None:
    assert describe_forecast_file(load_run(run, [override])) == describe_forecast_file(load_run(run, []))


def test_keys_missing_from_a_forecast_have_their_default(run: Path) -> None:
    recipe = forecast_recipe(load_run(run, []))
    del recipe["model"]["logit_softcap"], recipe["train"]["era_tokens"]
    change(run, recipe=recipe)
    assert len(describe_forecast_file(load_run(run, []))) == 2
    [line] = describe_forecast_file(load_run(run, ["model.logit_softcap=15"]))
    assert "logit_softcap is 15.0, but was None when" in line
    del recipe["train"]["validation_sequences"]  # forecasts from older versions do not have this key
    change(run, recipe=recipe)
    assert len(describe_forecast_file(load_run(run, ["validation_sequences=64"]))) == 2


DAMAGED = ["{", "[]", "{}", '{"recipe": 3}', "\0"]
TARGET = {"loss": 3.0, "low": 2.0, "high": 4.0, "extrapolation": 2.0}
WRONG: list[dict[str, Any]] = [
    *({"target": {"loss": "x"}}, {"target": None}),
    *({"target": TARGET | wrong} for wrong in ({"loss": -1.0}, {"low": 3.5}, {"high": 2.5}, {"extrapolation": 0})),
    *({"points": points} for points in (3, [], [3], [POINT, POINT | {"loss": "x"}], [POINT | {"tokens": -5}])),
    *({"held_out": held_out} for held_out in ([], {"error": -1}, {"error": True})),
    *({"date": 3}, {"commit": [1]}, {"recipe": []}),
]


@pytest.mark.parametrize("content", [*DAMAGED, *WRONG])
def test_damaged_forecasts_are_reported_in_one_line(run: Path, content: str | dict[str, Any]) -> None:
    if isinstance(content, dict):
        change(run, **content)
    else:
        (run / FORECAST).write_text(content)
    problem = "" if isinstance(content, str) else "not a ladder's forecast"
    advice = "move it away, or run experiment.py ladder again$"
    with pytest.raises(BadInput, match=rf"forecast\.json: {problem}.*; {advice}"):
        describe_forecast_file(load_run(run, []))
