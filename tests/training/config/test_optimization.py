"""Learning rates of train.json: each setting gives the right schedule and description."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_run
from training.config.batch_plan import describe, make_plan
from training.config.key_groups import OPTIMIZERS, OptimizationOptions
from training.config.optimization import describe_group_rates, describe_optimizer, describe_schedule, make_schedule
from training.config.train_config import load_run
from training.schedule import learning_rate


@pytest.mark.parametrize("steps", [1000, 2000])
def test_percentages_of_steps_are_exact(steps: int) -> None:
    for hundredths in range(0, 10_001, 10):
        options = OptimizationOptions(schedule_learning_rate=True, warmup_period_percent=hundredths / 100)
        assert make_schedule(options, steps).warmup_steps == steps * hundredths // 10_000


WARM_UP, TO_ZERO = {"warmup_period_percent": 5}, {"final_learning_rate_percent": 0}
STABLE = "warmup_stable_decay"
LONG_DECAY = {"decay_period_percent": 70, "final_learning_rate_percent": 5}


@pytest.mark.parametrize(
    ("scheduled", "keys", "last_rate", "description"),
    [
        (False, {}, 0.01, "constant learning rate 0.01"),
        ("constant", {}, 0.01, "constant learning rate 0.01"),
        (True, WARM_UP, 0.001, "50 steps of warm-up to 0.01, cosine decay to 0.001 at step 1,000"),
        ("cosine", TO_ZERO, 0, "0 steps of warm-up to 0.01, cosine decay to 0 at step 1,000"),
        ("linear", WARM_UP, 0, "50 steps of warm-up to 0.01, linear decay to 0 at step 1,000"),
        (STABLE, WARM_UP, 0, "50 steps of warm-up to 0.01, 750 at the peak, 200 of linear decay to 0 at step 1,000"),
        (
            STABLE,
            LONG_DECAY,
            5e-4,
            "0 steps of warm-up to 0.01, 300 at the peak, 700 of linear decay to 0.0005 at step 1,000",
        ),
    ],
)
def test_schedule_has_its_last_rate_and_description(
    scheduled: bool | str, keys: dict[str, Any], last_rate: float, description: str
) -> None:
    schedule = make_schedule(OptimizationOptions(learning_rate=0.01, schedule_learning_rate=scheduled, **keys), 1000)
    assert learning_rate(schedule, 999) == pytest.approx(last_rate, abs=1e-17)
    assert describe_schedule(schedule) == description


def test_learning_rates_by_group_are_described(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"matrix_learning_rate": 0.02, "vector_learning_rate": 0.3}
    run = load_run(write_run(tmp_path / "r", Path("x"), **keys), [])
    lines = describe(run.model, run.train, make_plan(run.train, run.model.context_length, 1))
    assert "rates        matrix 0.02, vector 0.3, all others 0.01; all share one schedule" in lines
    assert describe_group_rates(OptimizationOptions()) is None


def test_optimizer_is_described_with_its_settings() -> None:
    muon = {"optimizer": "muon", "muon_split_qkv": True, "muon_momentum_warmup_steps": 300}
    for keys, settings in (
        ({}, ""),
        ({"optimizer": "muon"}, "; momentum 0.95"),
        (muon, "; queries, keys and values separately; momentum 0.85 to 0.95 over 300 steps"),
    ):
        options = OptimizationOptions(**keys)
        assert describe_optimizer(options) == OPTIMIZERS[options.optimizer] + settings
