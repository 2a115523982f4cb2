"""Step intervals: when a run logs, validates, saves and hashes, how much of it remains, and when it stops early."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, MakeRun
from tests.training.conftest import ledger_of
from training.build import make_intervals, validation_steps
from training.command import Options
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.parallel.process_group import Ranks
from training.state import Position
from training.step_intervals import Intervals, StopRequest
from training.telemetry.budget import Budget
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
def test_a_job_ends_with_the_run_or_earlier(make_run: MakeRun, max_steps: int | None, last_step: int) -> None:
    run = load_run(make_run(checkpoint_interval=4, validation_interval=2, log_interval=5), [])
    plan = make_plan(run.train, run.model.context_length, 1, {"x": 100_000})
    intervals = make_intervals(run.train, plan, Options(max_steps=max_steps, hash_every=7))
    assert intervals.last_step == last_step
    assert (intervals.checkpoint, intervals.validation, intervals.log, intervals.state_hash) == (4, 2, 5, 7)


@pytest.mark.parametrize(
    ("asked", "reached", "cause"),
    [(False, False, None), (False, True, "--max-hours"), (True, False, "signal"), (True, True, "signal")],
)
def test_a_signal_or_the_ranks_own_condition_stops(
    alone: Ranks, clock: list[float], asked: bool, reached: bool, cause: str | None
) -> None:
    request = request_of(clock, hours=(23 if reached else 60) / 3600)
    request.ranks = alone
    if asked:
        request.asked.set()
    assert request.agreed() == (cause is not None)
    assert cause in (None, request.cause)


def request_of(clock: list[float], *, hours: float, validated: bool = True) -> Any:
    """Return a request after 23 s, of which the longest late step took 2 s and a validation, if any, 5."""
    run = load_run(ROOT / "runs" / "8xa100", ["validation_interval=10", "checkpoint_interval=40"])
    plan = make_plan(run.train, run.model.context_length, 8)
    ledger = ledger_of(clock)
    if not validated:
        ledger._counts["validation"] = 0
    fake: Any = SimpleNamespace
    return StopRequest(
        ranks=fake(),
        asked=threading.Event(),
        budget=Budget(max_hours=hours),
        ledger=ledger,
        state=fake(position=Position(step=8)),
        intervals=make_intervals(run.train, plan, Options(max_steps=100)),
        saving=fake(seconds_to_stop=1.0),
        validation_steps=validation_steps(plan),
    )


def test_a_validation_that_does_not_fit_is_not_begun(clock: list[float]) -> None:
    limits = request_of(clock, hours=34 / 3600)  # two steps and the end take 8, the save 1
    assert not limits.limit_reached()
    limits.state.position = Position(step=9)
    assert limits.limit_reached()


def test_the_first_validation_is_expected_to_take_as_long_as_its_share_of_a_step(clock: list[float]) -> None:
    limits = request_of(clock, validated=False, hours=1.0)
    sequences = load_run(ROOT / "runs" / "8xa100", []).train.validation.validation_sequences
    assert limits.validation_steps == pytest.approx(sequences / 128 / 3)
    limits.state.position = Position(step=9)
    expected = 2 * 2.0 + 4.0 + 1.0 + limits.validation_steps * 2.0
    for left, reached in ((expected + 0.1, False), (expected - 0.1, True)):
        tight = request_of(clock, validated=False, hours=(23.0 + left) / 3600)
        tight.state.position = Position(step=9)
        assert tight.limit_reached() == reached
