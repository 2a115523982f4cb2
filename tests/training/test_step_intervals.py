"""Step intervals: when a run logs, validates, saves and hashes, and how much of it remains."""

import pytest

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
