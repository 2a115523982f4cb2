"""Mixing law: planted laws and their optimum lie in the intervals, and a held-out mixture off the law is noticed."""

import numpy as np
import pytest

from experiments.mixture.mixing_law import fit_law, optima, simultaneous_bounds
from experiments.mixture.mixture_file import MixtureDesign
from experiments.mixture.mixture_table import MixtureTable, check_held_out, find_optimum

FLOORS, EXPONENTS = np.array([1.2, 1.0, 1.4]), np.array([0.3, 0.5, 0.2])
WORTH = np.array([[1.0, 0.2, 0.01], [0.1, 1.2, 0.1], [0.3, 0.02, 0.9]])  # for a domain, by source
SHARES = np.full(3, 1 / 3)


def planted(runs: int = 18, noise: float = 0.01, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return parts (runs, sources) and losses (runs, domains) of the planted laws."""
    random = np.random.default_rng(seed)
    parts = np.round(64 * random.dirichlet(np.ones(3), runs)).astype(np.int64)
    parts[0], parts[1:4] = 1, np.eye(3)
    weights = parts / parts.sum(1, keepdims=True)
    return parts, FLOORS + (weights @ WORTH.T) ** -EXPONENTS + noise * random.standard_normal((runs, 3))


def table(parts: np.ndarray, losses: np.ndarray) -> MixtureTable:
    mixture = MixtureDesign(sources=("a", "b", "c"), parts=parts)
    return MixtureTable(mixture=mixture, domains=["x", "y", "z"], shares=SHARES, unit="nats", losses=losses).judged()


def test_the_optimum_of_known_laws_is_where_no_source_lowers_the_loss() -> None:
    (best,) = optima(WORTH[None], EXPONENTS[None], SHARES)
    gradient = (SHARES * EXPONENTS * (WORTH @ best) ** (-EXPONENTS - 1)) @ WORTH
    assert best.sum() == pytest.approx(1) and (best > 0).all() and np.ptp(gradient) < 1e-6
    ((first, _),) = optima(np.eye(2)[None], np.ones((1, 2)), np.array([0.8, 0.2]))
    assert first == pytest.approx(2 / 3)  # where 0.8 / w^2 = 0.2 / (1 - w)^2
    (alone,) = optima(np.array([[[1.0, 0.5, 0.1]]]), np.ones((1, 1)), np.ones(1))
    assert alone.tolist() == [1, 0, 0]


def test_a_law_is_found_again_with_its_noise() -> None:
    parts, losses = planted(noise=0.02, runs=60)
    weights = parts / parts.sum(1, keepdims=True)
    law = fit_law(weights, losses[:, 0], np.random.default_rng(0))
    low, high = np.quantile(law.losses(weights), [0.001, 0.999], axis=0)
    true = FLOORS[0] + (weights @ WORTH[0]) ** -EXPONENTS[0]
    assert ((low < true) & (true < high)).all() and np.median(law.noise) == pytest.approx(0.02, rel=0.3)


def test_bounds_hold_all_columns_of_a_draw_together() -> None:
    draws = np.random.default_rng(0).standard_normal((1000, 5))
    low, high = simultaneous_bounds(draws, 0.9)
    assert np.mean(((draws >= low) & (draws <= high)).all(1)) == pytest.approx(0.9, abs=0.01)


def test_the_planted_optimum_and_gain_lie_in_their_intervals() -> None:
    (best,) = optima(WORTH[None], EXPONENTS[None], SHARES)
    points = np.stack([best, np.full(3, 1 / 3), *np.eye(3)])
    losses_there = (FLOORS + (points @ WORTH.T) ** -EXPONENTS).mean(1)
    true = [[*best], [losses_there[1] - losses_there[0]], [losses_there[2:].min() - losses_there[0]]]
    held = np.zeros(3)
    for seed in range(8):
        parts, losses = planted(seed=seed)
        weights, gains = find_optimum(parts / parts.sum(1, keepdims=True), losses, SHARES)
        for number, intervals in enumerate((weights, gains[:1], gains[1:])):
            pairs = zip(intervals, true[number], strict=True)
            held[number] += all(one.low <= value <= one.high for one, value in pairs)
    assert (held >= 6).all(), held


def test_a_verdict_needs_all_runs_a_law_that_predicts_and_a_gain() -> None:
    parts, losses = planted()
    assert table(parts, losses).verdict.startswith("Best mixture: gain over equal weights 0.0")
    missing = losses.copy()
    missing[3, 1] = np.nan
    assert table(parts, missing).verdict == "No verdict: 1 of 18 mixtures have no loss: not trained yet, or diverged."
    off = losses.copy()
    off[-1, 2] += 0.3
    assert check_held_out(parts / parts.sum(1, keepdims=True), off) == (1, 12)
    refused = table(parts, off)
    assert refused.verdict.startswith("No verdict: 1 of 12 held-out losses lie outside") and not refused.best
    chance = 2 + 0.01 * np.random.default_rng(1).standard_normal(losses.shape)
    assert table(parts, chance).verdict.startswith("No gain found: gain over equal weights")
