"""The learning rate warms up, decays to a tenth, and is a function of the step."""

import pytest

from training.schedule import Schedule, learning_rate

SCHEDULE = Schedule(peak=1e-3, warmup_steps=10, total_steps=100, constant=False)


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    rates = [learning_rate(SCHEDULE, step) for step in range(10)]
    assert rates == pytest.approx([1e-4 * (step + 1) for step in range(10)])


def test_decay_falls_to_a_tenth_at_the_last_step() -> None:
    rates = [learning_rate(SCHEDULE, step) for step in range(9, 100)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-4)
    assert learning_rate(SCHEDULE, 54) == pytest.approx(5.5e-4)  # half way: the mean of peak and end


def test_without_a_schedule_the_rate_is_constant() -> None:
    schedule = Schedule(peak=3e-4, warmup_steps=10, total_steps=100, constant=True)
    assert {learning_rate(schedule, step) for step in range(100)} == {3e-4}
