"""Verdicts: what they say, and on simulated losses how often they err."""

import numpy as np
import pytest

from experiments.sweep.dunnett import default_seeds
from experiments.sweep.verdicts import VariantResult, intervals, judge_variants

SEEDS = (42, 43, 44, 45, 46)
NOISE = (0.01, -0.02, 0.015, 0.0, -0.005)


def result(name: str, *losses: float | None, stopped_at: int | None = None) -> VariantResult:
    return VariantResult(name=name, losses=dict(zip(SEEDS, losses, strict=False)), stopped_at=stopped_at)


BASE = result("base", *(4 + noise for noise in NOISE))


def test_a_difference_far_beyond_the_noise_is_named_with_its_interval() -> None:
    better = result("good", *(3.5 + noise for noise in reversed(NOISE)))
    worse = result("bad", *(4.5 + noise for noise in reversed(NOISE)))
    verdicts = judge_variants(BASE, [better, worse], SEEDS)
    assert verdicts[0].text.startswith("better by 0.5000 [0.4")
    assert verdicts[1].text.startswith("worse by 0.5000 [0.4")
    assert verdicts[1].difference is not None
    assert verdicts[1].difference.value == pytest.approx(0.5)


def test_what_a_seed_does_to_all_variants_alike_is_no_noise() -> None:
    shift = (1.0, -2.0, 0.5, 3.0, -1.0)
    base = result("base", *(4 + seed + noise for seed, noise in zip(shift, NOISE, strict=True)))
    good = result("good", *(3.9 + seed - noise for seed, noise in zip(shift, NOISE, strict=True)))
    assert judge_variants(base, [good], SEEDS)[0].text.startswith("better by 0.1")


def test_no_difference_found_says_what_would_have_been_seen() -> None:
    same = result("same", *(4 + noise for noise in reversed(NOISE)))
    text = judge_variants(BASE, [same], SEEDS)[0].text
    assert text.startswith("no difference found: ")
    assert "; one of 0.0" in text and "is found in 90 of 100 sweeps, smaller ones less often" in text


def test_losses_of_the_same_bits_are_no_difference() -> None:
    assert judge_variants(BASE, [BASE], SEEDS)[0].text.startswith("no difference found")


def test_one_seed_gives_no_verdict() -> None:
    assert judge_variants(result("base", 4.0), [result("good", 3.0)], SEEDS[:1])[0].text == "no verdict: one seed"


def test_before_all_runs_have_ended_there_is_no_verdict() -> None:
    good = result("good", 3.0, 3.0, 3.0)
    assert judge_variants(BASE, [good], SEEDS)[0].text == "no verdict yet: 2 runs of the sweep are missing"


def test_diverged_and_stopped_variants_are_named_and_count_as_comparisons() -> None:
    wild = result("wild", 4.0, None, None, 4.0, 4.0)
    lost = result("lost", stopped_at=100)
    good = result("good", *(3.9 + noise for noise in reversed(NOISE)))
    verdicts = judge_variants(BASE, [wild, lost, good], SEEDS)
    assert [verdict.text for verdict in verdicts[:2]] == [
        "diverged in 2 of 5 seeds",
        "stopped at step 100 by the rule",
    ]
    alone = judge_variants(BASE, [good], SEEDS)[0].difference
    among = verdicts[2].difference
    assert alone is not None and among is not None and alone.low is not None and among.low is not None
    assert among.low < alone.low


def test_where_the_base_diverged_in_a_seed_there_is_no_verdict() -> None:
    base = result("base", None, 4.0, 4.1, 4.05, 4.02)
    good = result("good", 3.0, 3.0, 3.1, 3.05, 3.01)
    [verdict] = judge_variants(base, [good], SEEDS)
    assert verdict.text == "no verdict: the base diverged in 1 of 5 seeds" and verdict.difference is None


SWEEPS = 3000
BOUND = 0.05 + 3 * (0.05 * 0.95 / SWEEPS) ** 0.5  # three Monte-Carlo errors


@pytest.mark.parametrize("levers", [1, 2, 5])
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "unstable lever", "unstable base"])
def test_at_most_5_of_100_sweeps_without_differences_name_one(levers: int, seeds: int, kind: str) -> None:
    random = np.random.default_rng(levers + 10 * seeds)
    shape = (SWEEPS, levers + 1, seeds)
    losses = random.standard_t(3, shape) if kind == "heavy tails" else random.standard_normal(shape)
    losses[:, 1 if kind == "unstable lever" else 0] *= 5 if kind.startswith("unstable") else 1
    losses += 2 * random.standard_normal((SWEEPS, 1, seeds))
    assert np.mean([found(sweep).any() for sweep in losses]) <= BOUND


@pytest.mark.parametrize("levers", [1, 2, 5])
def test_three_seed_deviations_are_found_in_90_of_100_sweeps_of_the_default_seeds(levers: int) -> None:
    random = np.random.default_rng(levers)
    losses = random.standard_normal((SWEEPS, levers + 1, default_seeds(levers)))
    losses[:, 1] -= 3
    assert np.mean([found(sweep)[0] for sweep in losses]) >= 0.9


def found(sweep: np.ndarray) -> np.ndarray:
    differences, reach, _ = intervals(sweep, len(sweep) - 1)
    return np.abs(differences) > reach
