"""Builders: intervals and settings of a job, and what a validation costs in steps."""

from collections.abc import Callable
from pathlib import Path

import pytest

from training.build import make_settings, validation_steps
from training.command import Options
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.open_job import make_intervals
from training.precision import Numerics

LENGTHS = {"x": 100_000}


@pytest.mark.parametrize(("max_steps", "last_step"), [(None, 8), (3, 3), (50, 8)])
def test_a_job_ends_with_the_run_or_earlier(
    make_run: Callable[..., Path], max_steps: int | None, last_step: int
) -> None:
    run = load_run(make_run(checkpoint_interval=4, validation_interval=2, log_interval=5), [])
    plan = make_plan(run.train, run.model.context_length, 1, LENGTHS)
    intervals = make_intervals(run.train, plan, Options(max_steps=max_steps, hash_every=7))
    assert intervals.last_step == last_step
    assert (intervals.checkpoint, intervals.validation, intervals.log, intervals.state_hash) == (4, 2, 5, 7)


def test_settings_of_a_step_come_from_train_json_and_the_plan(make_run: Callable[..., Path]) -> None:
    run = load_run(make_run(random_seed=5, clipping_max_norm=2.0), [])
    plan = make_plan(run.train, run.model.context_length, 1, LENGTHS)
    numerics = Numerics(determinism="elastic", precision="fp32", compiled=False)
    settings = make_settings(run.train, plan, numerics)
    assert (settings.seed, settings.clipping_max_norm) == (5, 2.0)
    assert settings.layout is plan.layout and settings.schedule is plan.schedule and settings.numerics is numerics


def test_a_validation_costs_its_share_of_a_step(make_run: Callable[..., Path]) -> None:
    run = load_run(make_run(validation_sequences=24), [])  # a step: 8 sequences
    plan = make_plan(run.train, run.model.context_length, 1, LENGTHS)
    assert validation_steps(plan) == pytest.approx(24 / 8 / 3)
