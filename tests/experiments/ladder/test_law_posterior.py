"""The posterior of a loss law: its intervals have the stated coverage.

benchmarks/forecast_coverage.py is the longer version of these tests.
"""

import forecast_coverage
import numpy as np
import pytest
from forecast_coverage import EXACT, SHAPES, simulate

from experiments.ladder.law_posterior import Observations, explaining_laws


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape == "4 sizes" else pytest.mark.slow) for shape in SHAPES]
)
def test_new_runs_are_inside_the_interval(shape: str) -> None:
    simulations = [simulate("exact law", truth, shape, seed) for seed in range(7) for truth in EXACT]
    assert sum(simulation.inside for simulation in simulations) / len(simulations) >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.002, 0.0133])
@pytest.mark.parametrize("shared", [0.0, 0.8, 0.95])
def test_ninety_percent_intervals_cover_85_to_96_percent(
    monkeypatch: pytest.MonkeyPatch, noise: float, shared: float
) -> None:
    monkeypatch.setattr(forecast_coverage, "NOISES", (noise,))
    monkeypatch.setattr(forecast_coverage, "SHARED", (shared,))
    groups = {name: forecast_coverage.GROUPS[name] for name in ("exact law", "mildly misspecified")}
    shape = "4 sizes, 2 horizons, 3 seeds"
    simulations = [
        simulate(group, truth, shape, seed) for group in groups for truth in groups[group] for seed in range(20)
    ]
    inside = [simulation.inside for simulation in simulations if not simulation.refused]
    error = 2 * (0.9 * 0.1 / len(inside)) ** 0.5
    print(f"noise {noise}, shared {shared}: {np.mean(inside):.1%} of {len(inside)} forecasts")
    assert 0.85 - error <= np.mean(inside) <= 0.96 + error


@pytest.mark.slow
def test_exponents_below_the_grid_give_no_forecast() -> None:
    simulations = [
        simulate("outside of the prior", truth, "4 sizes, 2 horizons, 3 seeds", seed)
        for truth in forecast_coverage.OUTSIDE
        for seed in range(30)
    ]
    # Without the rule about the edge of the tested exponents, only a fifth of these ladders would be refused.
    assert np.mean([simulation.refused for simulation in simulations]) >= 0.8


def test_laws_are_positive_and_unusual_exponents_possible() -> None:
    sizes, tokens = (values.ravel() for values in np.meshgrid(np.linspace(-2, 2, 5), np.linspace(-2, 2, 5)))
    losses = 0.5 + np.exp(-0.8 * sizes) + np.exp(-0.7 * tokens)
    trunks = sizes[:, None] == sizes[None, :]
    laws = explaining_laws(Observations(sizes=sizes, tokens=tokens, losses=losses, same_trunk=trunks, noise=0.005))
    for values, truth in ((laws.alpha, 0.8), (laws.beta, 0.7), (laws.floor, 0.5), (laws.size_part, 1.0)):
        assert values.min() > 0
        low, high = laws.quantiles(values, 0.01, 0.99)
        assert low < truth < high
        assert high - low < 0.2
