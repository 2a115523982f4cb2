"""Verdicts of sweeps: their texts, their error rates on simulated losses, and the table."""

import attrs
import numpy as np
import pytest

from evaluation.shared.significance import default_seeds
from experiments.sweep.sweep_file import Halving, read_sweep
from experiments.sweep.sweep_table import SweepTable, VariantResult, compare_with_base, judge_variants
from tests.conftest import slow
from tests.experiments.conftest import MakeSweep

SEEDS = (42, 43, 44, 45, 46)
NOISE = (0.01, -0.02, 0.015, 0.0, -0.005)


def result(name: str, *losses: float | None, stopped_at: int | None = None) -> VariantResult:
    return VariantResult(name=name, losses=dict(zip(SEEDS, losses, strict=False)), stopped_at=stopped_at)


BASE = result("base", *(4 + noise for noise in NOISE))


def test_large_differences_are_reported_with_their_interval() -> None:
    better = result("good", *(3.5 + noise for noise in reversed(NOISE)))
    worse = result("bad", *(4.5 + noise for noise in reversed(NOISE)))
    verdicts = judge_variants(BASE, [better, worse], SEEDS)
    assert verdicts[0].text.startswith("better by 0.5000 [0.4")
    assert verdicts[1].text.startswith("worse by 0.5000 [0.4")
    assert verdicts[1].difference is not None
    assert verdicts[1].difference.value == pytest.approx(0.5)


def test_effects_of_a_seed_on_all_variants_cancel() -> None:
    shift = (1.0, -2.0, 0.5, 3.0, -1.0)
    base = result("base", *(4 + seed + noise for seed, noise in zip(shift, NOISE, strict=True)))
    good = result("good", *(3.9 + seed - noise for seed, noise in zip(shift, NOISE, strict=True)))
    assert judge_variants(base, [good], SEEDS)[0].text.startswith("better by 0.1")


@pytest.mark.parametrize(
    ("base", "variant", "text"),
    [
        (BASE, result("same", *(4 + noise for noise in reversed(NOISE))), "no difference found: "),
        (result("base", 4.0), result("good", 3.0), "no verdict: one seed"),
        (BASE, result("good", 3.0, 3.0, 3.0), "no verdict yet: 2 runs of the sweep are missing"),
        (result("base", None, 4.0, 4.1, 4.05, 4.02), BASE, "no verdict: the base diverged in 1 of 5 seeds"),
    ],
)
def test_without_seeds_or_runs_there_is_no_verdict(base: VariantResult, variant: VariantResult, text: str) -> None:
    [verdict] = judge_variants(base, [variant], SEEDS[: len(base.losses)])
    assert verdict.text.startswith(text)
    # The verdict ends with the interval. It states no power, because this would depend on an estimated deviation.
    assert verdict.text.endswith("]") == text.startswith("no difference")


def test_diverged_and_stopped_variants_count_as_comparisons() -> None:
    wild = result("wild", 4.0, None, None, 4.0, 4.0)
    stopped = result("lost", stopped_at=100)
    good = result("good", *(3.9 + noise for noise in reversed(NOISE)))
    verdicts = judge_variants(BASE, [wild, stopped, good], SEEDS)
    assert [verdict.text for verdict in verdicts[:2]] == ["diverged in 2 of 5 seeds", "stopped at step 100 by the rule"]
    alone = judge_variants(BASE, [good], SEEDS)[0].difference
    among = verdicts[2].difference
    assert alone is not None and among is not None and alone.low is not None and among.low is not None
    assert among.low < alone.low


SWEEPS = 1000
BOUND = 0.05 + 3 * (0.05 * 0.95 / SWEEPS) ** 0.5  # 5% plus three Monte Carlo errors


@pytest.mark.parametrize(("levers", "seeds"), [(1, 3), (2, 5), *slow((5, 5))])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "unstable lever", "unstable base"])
def test_at_most_5_percent_of_sweeps_err(levers: int, seeds: int, kind: str) -> None:
    random = np.random.default_rng(levers + 10 * seeds)
    shape = (SWEEPS, levers + 1, seeds)
    losses = random.standard_t(3, shape) if kind == "heavy tails" else random.standard_normal(shape)
    losses[:, 1 if kind == "unstable lever" else 0] *= 5 if kind.startswith("unstable") else 1
    losses += 2 * random.standard_normal((SWEEPS, 1, seeds))
    assert np.mean([any(significant_levers(sweep)) for sweep in losses]) <= BOUND


@pytest.mark.parametrize("levers", [1, 2, *slow(5)])
def test_default_seeds_find_three_deviations_in_90_percent(levers: int) -> None:
    random = np.random.default_rng(levers)
    losses = random.standard_normal((SWEEPS, levers + 1, default_seeds(levers)))
    losses[:, 1] -= 3
    assert np.mean([significant_levers(sweep)[0] for sweep in losses]) >= 0.88


def test_gains_of_survivors_are_honest_bounds() -> None:
    random, levers, true_gain = np.random.default_rng(0), 6, 0.3  # every lever gains three seed deviations
    stated_gains = []
    for _ in range(SWEEPS):
        losses = 4 + 0.1 * (random.standard_normal((1, 5)) + random.standard_normal((levers + 1, 5)))
        losses[1:] -= true_gain
        losers = Halving(factor=6, rungs=(0.5,)).losers({f"{row}": losses[row].mean() for row in range(1, levers + 1)})
        results = [
            result(f"{row}", stopped_at=9) if f"{row}" in losers else result(f"{row}", *losses[row])
            for row in range(1, levers + 1)
        ]
        texts = [verdict.text for verdict in judge_variants(result("base", *losses[0]), results, SEEDS)]
        stated_gains += [float(text.split()[-1]) for text in texts if text.startswith("better by at least ")]
    assert len(stated_gains) > SWEEPS / 2
    assert sum(gain > true_gain for gain in stated_gains) <= BOUND * SWEEPS


def significant_levers(sweep: np.ndarray) -> list[bool]:
    base, *levers = [dict(enumerate(losses.tolist())) for losses in sweep]
    return [difference.excludes_zero for difference, _ in compare_with_base(base, levers, len(levers))]


def test_the_table_names_missing_runs_and_seeds(make_sweep: MakeSweep) -> None:
    sweep = read_sweep(make_sweep(seeds=3))
    base = VariantResult(name="base", losses={42: 4.0, 43: 4.1, 44: 4.2})
    text = SweepTable.of(sweep, [base, VariantResult(name="wild", losses={42: 3.0, 43: None, 44: 3.2})]).text()
    assert "4.1000 " in text and "3.1000 (of 2)" in text and "diverged in 1 of 3 seeds" in text
    text = SweepTable.of(sweep, [base, attrs.evolve(base, name="same")]).text()
    assert "intervals for 1 comparison." in text
    assert "the standard deviation of a run's loss over seeds is 0.0000 " in text
    text = SweepTable.of(sweep, [base, VariantResult(name="late", losses={43: 4.0})]).text()
    name = sweep.variants[1].name
    assert f"Missing: {name}-seed-42, {name}-seed-44." in text
