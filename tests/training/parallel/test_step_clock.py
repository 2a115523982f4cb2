"""The step clock measures only a rank's own work. It excludes waits for other ranks and the time between steps."""

import torch

from training.parallel.step_clock import StepClock, StepSeconds


def test_own_seconds_exclude_reductions_and_waits(clock: list[float]) -> None:
    steps = StepClock(torch.device("cpu"))
    for _ in range(2):
        clock[0] += 1000  # between steps
        with steps.timed():
            clock[0] += 1
            steps.begin_waiting()
            clock[0] += 20  # waiting for weights
            steps.end_waiting()
            clock[0] += 2
            for _ in range(2):
                with steps.reducing():
                    clock[0] += 300
                clock[0] += 4
    with steps.timed():
        assert steps.totals == StepSeconds(steps=2, own=2 * 7)


def test_steps_without_reductions_are_all_own_work(clock: list[float]) -> None:
    steps = StepClock(torch.device("cpu"))
    with steps.reducing():
        clock[0] += 1
    with steps.timed():
        clock[0] += 3
    with steps.reducing():
        clock[0] += 1
    with steps.timed():
        assert steps.totals == StepSeconds(steps=1, own=3)
