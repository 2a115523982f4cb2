"""Every schedule warms up, decays to its final rate at the last step, and depends only on the step."""

import math

import attrs
import pytest

from training.schedule import DECAYS, Schedule, learning_rate

COSINE = Schedule(peak=1e-3, decay="cosine", warmup_steps=10, decay_steps=90, total_steps=100, final_fraction=0.1)
STABLE = attrs.evolve(COSINE, decay="warmup_stable_decay", decay_steps=20, final_fraction=0.0)


@pytest.mark.parametrize("decay", DECAYS)
def test_warm_up_is_linear_up_to_the_peak(decay: str) -> None:
    rates = [learning_rate(attrs.evolve(COSINE, decay=decay), step) for step in range(10)]
    assert rates == pytest.approx([1e-4 * (step + 1) for step in range(10)])


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_decay_reaches_the_final_rate_at_the_end(decay: str, final: float) -> None:
    schedule = attrs.evolve(COSINE, decay=decay, final_fraction=final)
    rates = [learning_rate(schedule, step) for step in range(9, 100)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-3 * final, abs=1e-18)
    # Halfway, the rate is the mean of the peak and the final rate.
    assert learning_rate(schedule, 54) == pytest.approx(1e-3 * (1 + final) / 2)


def test_cosine_schedule_keeps_its_bits() -> None:
    for step in range(10, 100):
        cosine = 0.5 * (1 + math.cos(math.pi * ((step - 10 + 1) / 90)))
        assert learning_rate(COSINE, step) == 1e-3 * (0.1 + (1 - 0.1) * cosine)


def test_stable_phase_is_at_the_peak() -> None:
    assert {learning_rate(STABLE, step) for step in range(9, 80)} == {1e-3}
    rates = [learning_rate(STABLE, step) for step in range(80, 100)]
    assert rates == pytest.approx([1e-3 * (19 - step) / 20 for step in range(20)], abs=1e-18)


def test_rate_is_constant_without_a_decay() -> None:
    schedule = attrs.evolve(COSINE, decay=None)
    assert {learning_rate(schedule, step) for step in range(100)} == {1e-3}


def test_empty_phases_are_skipped() -> None:
    assert learning_rate(attrs.evolve(STABLE, warmup_steps=0, decay_steps=0), 99) == 1e-3
    assert learning_rate(attrs.evolve(COSINE, warmup_steps=100, decay_steps=0), 99) == 1e-3
    assert learning_rate(attrs.evolve(STABLE, warmup_steps=0, decay_steps=100), 0) == pytest.approx(0.99e-3)
