"""Posterior of a loss law: its intervals cover as stated; benchmarks/forecast_coverage.py is the longer version."""

import forecast_coverage
import numpy as np
import pytest
from forecast_coverage import EXACT, SHAPES, simulate

from experiments.ladder.law_posterior import Observations, explaining_laws


@pytest.mark.parametrize("shape", SHAPES)
def test_new_runs_lie_in_the_interval(shape: str) -> None:
    done = [simulate("exact law", truth, shape, seed) for seed in range(7) for truth in EXACT]
    assert sum(one.inside for one in done) / len(done) >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_ninety_percent_interval_covers_85_to_95_percent(shape: str) -> None:
    groups = {"exact law": 20, "mildly misspecified": 20}
    done = [
        simulate(group, truth, shape, seed)
        for group, seeds in groups.items()
        for truth in forecast_coverage.GROUPS[group]
        for seed in range(seeds)
    ]
    assert 0.85 <= sum(one.inside for one in done) / len(done) <= 0.95


def test_laws_are_positive_and_far_exponents_win_where_the_points_speak_for_them() -> None:
    sizes, tokens = (values.ravel() for values in np.meshgrid(np.linspace(-2, 2, 5), np.linspace(-2, 2, 5)))
    losses = 0.5 + np.exp(-0.8 * sizes) + np.exp(-0.7 * tokens)
    trunks = sizes[:, None] == sizes[None, :]
    laws = explaining_laws(Observations(sizes=sizes, tokens=tokens, losses=losses, same_trunk=trunks))
    for values, truth in ((laws.alpha, 0.8), (laws.beta, 0.7), (laws.floor, 0.5), (laws.size_part, 1.0)):
        assert values.min() > 0
        low, high = laws.quantiles(values, 0.01, 0.99)
        assert low < truth < high
        assert high - low < 0.2
