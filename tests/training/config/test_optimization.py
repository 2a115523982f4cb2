"""Learning rates of train.json: the schedule each setting asks for, in numbers and in words; contradictions."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from tests.conftest import TINY_MODEL, TINY_TRAIN
from tests.training.config.test_train_config import run_directory
from training.config.batch_plan import describe, make_plan
from training.config.key_groups import OPTIMIZERS, OptimizationOptions
from training.config.optimization import describe_group_rates, describe_optimizer, describe_schedule, make_schedule
from training.config.train_config import load_run
from training.schedule import learning_rate


@pytest.mark.parametrize("steps", [1000, 2000])
def test_percentages_of_steps_are_exact_and_of_older_runs_as_they_were(steps: int) -> None:
    rounded_away = 0
    for hundredths in range(0, 10_001, 10):
        options = OptimizationOptions(schedule_learning_rate=True, warmup_period_percent=hundredths / 100)
        exact, older = (make_schedule(options, steps, exact=exact).warmup_steps for exact in (True, False))
        assert exact == steps * hundredths // 10_000
        assert older == int(steps * options.warmup_period_percent // 100)
        rounded_away += exact != older
    assert rounded_away > 0


@pytest.mark.parametrize(
    ("keys", "last", "words"),
    [
        ({}, 0.01, "constant learning rate 0.01"),
        ({"schedule_learning_rate": "constant"}, 0.01, "constant learning rate 0.01"),
        (
            {"schedule_learning_rate": True, "warmup_period_percent": 5},
            0.001,
            "50 steps of warm-up to 0.01, cosine decay to 0.001 at step 1,000",
        ),
        (
            {"schedule_learning_rate": "cosine", "final_learning_rate_percent": 0},
            0,
            "0 steps of warm-up to 0.01, cosine decay to 0 at step 1,000",
        ),
        (
            {"schedule_learning_rate": "linear", "warmup_period_percent": 5},
            0,
            "50 steps of warm-up to 0.01, linear decay to 0 at step 1,000",
        ),
        (
            {"schedule_learning_rate": "warmup_stable_decay", "warmup_period_percent": 5},
            0,
            "50 steps of warm-up to 0.01, 750 at it, 200 of linear decay to 0 at step 1,000",
        ),
        (
            {
                "schedule_learning_rate": "warmup_stable_decay",
                "decay_period_percent": 70,
                "final_learning_rate_percent": 5,
            },
            0.0005,
            "0 steps of warm-up to 0.01, 300 at it, 700 of linear decay to 0.0005 at step 1,000",
        ),
    ],
)
def test_each_schedule_in_numbers_and_in_words(keys: dict[str, Any], last: float, words: str) -> None:
    schedule = make_schedule(OptimizationOptions(learning_rate=0.01, **keys), 1000)
    assert learning_rate(schedule, 999) == pytest.approx(last, abs=1e-17)
    assert describe_schedule(schedule) == words


def test_the_two_spellings_of_a_schedule_are_one_recipe() -> None:
    for name, scheduled in (("cosine", True), ("constant", False)):
        assert OptimizationOptions(schedule_learning_rate=name) == OptimizationOptions(schedule_learning_rate=scheduled)


def test_rates_by_group_are_listed_beside_the_schedule(tmp_path: Path) -> None:
    keys = {"matrix_learning_rate": 0.02, "vector_learning_rate": 0.3}
    run = load_run(run_directory(tmp_path / "r", TINY_MODEL, {"dataset": "x"} | TINY_TRAIN | keys), [])
    lines = describe(run.model, run.train, make_plan(run.train, run.model.context_length, 1))
    assert "rates        matrix 0.02, vector 0.3, all else 0.01; one schedule" in lines
    assert describe_group_rates(OptimizationOptions()) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"schedule_learning_rate": "step"}, "schedule_learning_rate: got 'step', wanted true, false, "),
        ({"schedule_learning_rate": 1}, "schedule_learning_rate: got 1, wanted true, false, "),
        ({"decay_period_percent": 40}, "decay_period_percent: got 40, wanted null, or schedule_learning_rate"),
        ({"decay_period_percent": 0}, "decay_period_percent: got 0, wanted a number above 0 up to 100"),
        (
            {"schedule_learning_rate": "warmup_stable_decay", "decay_period_percent": 80},
            "decay_period_percent: got 80, wanted at most 75: warmup_period_percent takes 25 of the 100",
        ),
        (
            {"schedule_learning_rate": False, "final_learning_rate_percent": 5},
            "final_learning_rate_percent: got 5, wanted null, or a schedule_learning_rate that decays",
        ),
        (
            {"head_learning_rate": 0.01},
            "head_learning_rate: got 0.01, wanted null, because tie_weights is true: the head is the token embedding",
        ),
        ({"vector_learning_rate": 0}, "vector_learning_rate: got 0, wanted a number above 0"),
        ({"matrix_lr": 0.02}, "unknown key 'matrix_lr'; did you mean 'matrix_learning_rate'?"),
        ({"lr_scheduler_type": "linear"}, "unknown key 'lr_scheduler_type'; here it is train.schedule_learning_rate"),
    ],
)
def test_wrong_and_contradictory_settings_are_one_line(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    directory = run_directory(tmp_path / "r", TINY_MODEL, {"dataset": "x"} | TINY_TRAIN | keys)
    with pytest.raises(BadInput) as raised:
        load_run(directory, [])
    assert str(raised.value).startswith(f"{directory / 'train.json'}: {message}"), str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_optimizer_is_described_with_its_own_settings() -> None:
    muon = {"optimizer": "muon", "muon_split_qkv": True, "muon_momentum_warmup_steps": 300}
    for keys, settings in (
        ({}, ""),
        ({"optimizer": "muon"}, "; momentum 0.95"),
        (muon, "; queries, keys and values apart; momentum 0.85 to 0.95 in 300 steps"),
    ):
        options = OptimizationOptions(**keys)
        assert describe_optimizer(options) == OPTIMIZERS[options.optimizer] + settings
