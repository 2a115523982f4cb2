"""Step clock: own seconds of steps, without those of waiting for other ranks and outside steps."""

import pytest
import torch

from training.parallel import step_clock
from training.parallel.step_clock import StepClock, StepSeconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time that the clock shows, to be changed."""
    seconds = [100.0]
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: seconds[0])
    return seconds


def test_own_seconds_end_with_the_last_gradient_and_leave_out_reductions_and_waits(now: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    for _ in range(2):
        now[0] += 1000  # between steps
        with clock.timed():
            now[0] += 1
            clock.begin_waiting()
            now[0] += 20  # for weights
            clock.end_waiting()
            now[0] += 2
            for _ in range(2):
                with clock.reducing():
                    now[0] += 300
                now[0] += 4
    with clock.timed():
        assert clock.totals == StepSeconds(steps=2, own=2 * 7)


def test_a_step_without_reduction_is_all_own_and_what_is_outside_of_steps_counts_nowhere(now: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    with clock.reducing():
        now[0] += 1
    with clock.timed():
        now[0] += 3
    with clock.reducing():
        now[0] += 1
    with clock.timed():
        assert clock.totals == StepSeconds(steps=1, own=3)
