"""Spot machines: the expected time is that of simulated runs; Young's interval is the best, or nearly."""

import math

import attrs
import pytest
from preempted_runs import START_UP, WORK, going_on, simulate, standing_still

from training.planning.spot import PREEMPTIONS_PER_HOUR, Preemptions

SPOT = Preemptions(per_hour=PREEMPTIONS_PER_HOUR, checkpoint_seconds=60.0, segments=WORK / 900)


@pytest.mark.parametrize("per_hour", [0.1, PREEMPTIONS_PER_HOUR, 2.0])
def test_the_expected_time_is_the_mean_of_simulated_runs(per_hour: float) -> None:
    setting = attrs.evolve(SPOT, per_hour=per_hour)
    mean, error = simulate(standing_still, setting, 1000)
    assert abs(mean - setting.seconds(START_UP, WORK) / 3600) < 3 * error
    assert simulate(going_on, setting, 1000)[0] < mean


def test_without_preemptions_it_is_start_up_work_and_saves_and_with_too_many_infinite() -> None:
    rare, often = attrs.evolve(SPOT, per_hour=1e-9), attrs.evolve(SPOT, per_hour=60.0, segments=1.0)
    assert rare.seconds(START_UP, WORK) == pytest.approx(START_UP + WORK + 40 * 60)
    assert math.isfinite(often.seconds(START_UP, WORK)) and often.seconds(START_UP, 1e7) == math.inf


def test_young_s_interval_costs_at_most_a_thousandth_more_than_the_best() -> None:
    def seconds(interval: float) -> float:
        return attrs.evolve(SPOT, segments=WORK / interval).seconds(START_UP, WORK)

    assert seconds(SPOT.best_interval_seconds()) < 1.001 * min(map(seconds, range(100, 4000, 50)))
