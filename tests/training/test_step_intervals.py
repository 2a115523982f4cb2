"""Step intervals: when a run logs, validates, saves and hashes, and how much of it remains."""

from collections.abc import Callable
from pathlib import Path

import pytest

from training.build import make_intervals
from training.command import Options
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.step_intervals import Intervals
from training.telemetry.time_ledger import Remaining

INTERVALS = Intervals(log=4, checkpoint=6, validation=5, state_hash=7, last_step=20)


def due(name: str) -> list[int]:
    return [step for step in range(21) if getattr(INTERVALS, f"{name}_due")(step)]


def test_each_thing_is_done_at_its_interval_and_at_the_end() -> None:
    assert due("log") == [0, 1, 4, 8, 12, 16, 20]
    assert due("checkpoint") == [6, 12, 18, 20]
    assert due("validation") == [0, 5, 6, 10, 12, 15, 18, 20]  # with each checkpoint as well
    assert due("hash") == [0, 7, 14]


def test_without_validation_none_is_due() -> None:
    silent = Intervals(log=1, checkpoint=2, validation=None, state_hash=None, last_step=4)
    assert not any(silent.validation_due(step) or silent.hash_due(step) for step in range(5))
    assert silent.remaining(1) == Remaining(steps=3, validations=0, checkpoints=2)


@pytest.mark.parametrize("step", [1, 6, 7, 19, 20])
def test_the_remaining_work_is_what_is_due_from_a_step_on(step: int) -> None:
    remaining = INTERVALS.remaining(step)
    later = range(step, 21)
    assert remaining.steps == 20 - step
    assert remaining.validations == sum(map(INTERVALS.validation_due, later))
    assert remaining.checkpoints == sum(map(INTERVALS.checkpoint_due, later))


@pytest.mark.parametrize(("max_steps", "last_step"), [(None, 8), (3, 3), (50, 8)])
def test_a_job_ends_with_the_run_or_earlier(
    make_run: Callable[..., Path], max_steps: int | None, last_step: int
) -> None:
    run = load_run(make_run(checkpoint_interval=4, validation_interval=2, log_interval=5), [])
    plan = make_plan(run.train, run.model.context_length, 1, {"x": 100_000})
    intervals = make_intervals(run.train, plan, Options(max_steps=max_steps, hash_every=7))
    assert intervals.last_step == last_step
    assert (intervals.checkpoint, intervals.validation, intervals.log, intervals.state_hash) == (4, 2, 5, 7)
