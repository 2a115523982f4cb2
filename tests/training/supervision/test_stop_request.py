"""All ranks agree to stop if one of them has received a signal, or if the next step would exceed a limit."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.training.conftest import ledger_of
from training.build import make_intervals, validation_steps
from training.command import Options
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.parallel.process_group import Ranks
from training.state import Position
from training.supervision.stop_request import StopRequest
from training.telemetry.budget import Budget


@pytest.mark.parametrize(
    ("signalled", "reached", "cause"),
    [(False, False, None), (False, True, "--max-hours"), (True, False, "signal"), (True, True, "signal")],
)
def test_signal_or_limit_stops(
    alone: Ranks, clock: list[float], signalled: bool, reached: bool, cause: str | None
) -> None:
    request = request_of(clock, hours=(23 if reached else 60) / 3600)
    request.ranks = alone
    if signalled:
        request.stop_requested.set()
    assert request.agreed() == (cause is not None)
    assert cause in (None, request.cause)


def request_of(clock: list[float], *, hours: float, validated: bool = True) -> Any:
    """Return the StopRequest of a job that was started 23 s ago.

    The longest recent step took 2 s. If `validated`, the job has also validated, which took 5 s.
    """
    run = load_run(ROOT / "runs" / "8xa100", ["validation_interval=10", "checkpoint_interval=40"])
    plan = make_plan(run.train, run.model.context_length, 8)
    ledger = ledger_of(clock)
    if not validated:
        ledger._counts["validation"] = 0
    fake: Any = SimpleNamespace
    return StopRequest(
        ranks=fake(),
        stop_requested=threading.Event(),
        budget=Budget(max_hours=hours),
        ledger=ledger,
        state=fake(position=Position(step=8)),
        validation_due=make_intervals(run.train, plan, Options(max_steps=100)).validation_due,
        saving=fake(seconds_to_stop=1.0),
        validation_steps=validation_steps(plan),
    )


def test_validation_beyond_the_limit_does_not_begin(clock: list[float]) -> None:
    limits = request_of(clock, hours=34 / 3600)  # two steps and the end take 8 s, and the save takes 1 s
    assert not limits.limit_reached()
    limits.state.position = Position(step=9)
    assert limits.limit_reached()


def test_first_validation_is_estimated_from_step_time(clock: list[float]) -> None:
    limits = request_of(clock, validated=False, hours=1.0)
    sequences = load_run(ROOT / "runs" / "8xa100", []).train.validation.validation_sequences
    assert limits.validation_steps == pytest.approx(sequences / 128 / 3)
    limits.state.position = Position(step=9)
    expected = 2 * 2.0 + 4.0 + 1.0 + limits.validation_steps * 2.0
    for remaining, reached in ((expected + 0.1, False), (expected - 0.1, True)):
        request = request_of(clock, validated=False, hours=(23.0 + remaining) / 3600)
        request.state.position = Position(step=9)
        assert request.limit_reached() == reached
