"""Mixing law: planted laws and their optimum lie in the intervals, and a held-out mixture off the law is noticed."""

import numpy as np
import pytest

from experiments.mixture.mixing_law import fit_law, optima, simultaneous_bounds
from experiments.mixture.mixture_file import MixtureDesign
from experiments.mixture.mixture_table import MixtureTable, check_held_out, find_optimum

FLOORS = np.array([1.2, 1.0, 1.4])
SLOPES = np.array([[-1.2, 0.3, 0.2], [0.4, -1.4, 0.1], [0.3, 0.2, -1.1]])  # of a domain, by source
SHARES = np.full(3, 1 / 3)


def planted(runs: int = 18, noise: float = 0.01, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return parts (runs, sources) and losses (runs, domains) of the planted laws."""
    random = np.random.default_rng(seed)
    parts = np.round(64 * random.dirichlet(np.ones(3), runs)).astype(np.int64)
    parts[0] = 1
    weights = parts / parts.sum(1, keepdims=True)
    return parts, FLOORS + np.exp(weights @ SLOPES.T) + noise * random.standard_normal((runs, 3))


def table(parts: np.ndarray, losses: np.ndarray) -> MixtureTable:
    mixture = MixtureDesign(sources=("a", "b", "c"), parts=parts)
    return MixtureTable(mixture=mixture, domains=["x", "y", "z"], shares=SHARES, unit="nats", losses=losses).judged()


def test_the_optimum_of_known_laws_is_where_no_source_lowers_the_loss() -> None:
    (best,) = optima(SLOPES[None], SHARES)
    gradient = (SHARES * np.exp(SLOPES @ best)) @ SLOPES
    assert best.sum() == pytest.approx(1) and (best > 0).all() and np.ptp(gradient) < 1e-6
    apart = np.array([[[-6.0, 0.0], [0.0, -6.0]]])
    ((first, _),) = optima(apart, np.array([0.6, 0.4]))
    assert first == pytest.approx(0.5 + np.log(1.5) / 12, abs=1e-4)  # where 0.6 exp(-6 w) = 0.4 exp(-6 (1 - w))
    (alone,) = optima(np.array([[[-1.0, 0.0, 0.5]]]), np.ones(1))
    assert alone.tolist() == [1, 0, 0]


def test_a_law_is_found_again_with_its_noise() -> None:
    parts, losses = planted(noise=0.02, runs=60)
    weights = parts / parts.sum(1, keepdims=True)
    law = fit_law(weights, losses[:, 0], np.random.default_rng(0))
    low, high = np.quantile(law.losses(weights), [0.001, 0.999], axis=0)
    true = FLOORS[0] + np.exp(weights @ SLOPES[0])
    assert ((low < true) & (true < high)).all() and np.median(law.noise) == pytest.approx(0.02, rel=0.3)


def test_bounds_hold_all_columns_of_a_draw_together() -> None:
    draws = np.random.default_rng(0).standard_normal((1000, 5))
    low, high = simultaneous_bounds(draws, 0.9)
    assert np.mean(((draws >= low) & (draws <= high)).all(1)) == pytest.approx(0.9, abs=0.01)


def test_the_planted_optimum_and_gain_lie_in_their_intervals() -> None:
    parts, losses = planted()
    (best,) = optima(SLOPES[None], SHARES)
    weights, gains = find_optimum(parts / parts.sum(1, keepdims=True), losses, SHARES)
    assert all(one.low <= true <= one.high for one, true in zip(weights, best, strict=True))
    points = np.stack([best, np.full(3, 1 / 3), *np.eye(3)])
    true = (FLOORS[:, None] + np.exp(SLOPES @ points.T)).mean(0)
    assert gains[0].low <= true[1] - true[0] <= gains[0].high
    assert gains[1].low <= true[2:].min() - true[0] <= gains[1].high


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
