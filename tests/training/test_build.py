"""Builders: the intervals of a job, which may end before the run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from training.command import Options
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.open_job import make_intervals

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
