"""The rule of a trial: levels add up to the stated error, looks share a level, and known losses get right verdicts."""

import math
from pathlib import Path

import attrs
import numpy as np
import pytest

from evaluation.shared.significance import ERROR
from experiments.trial.trial import Trial
from experiments.trial.trial_rule import TrialRule, assumption, detectable, keep_level, seeds_of
from experiments.trial.trial_table import TrialTable

LEVEL = 0.001


@pytest.fixture
def rule() -> TrialRule:
    return TrialRule.of(LEVEL, None)


def differences(mean: float, pairs: int, seed: int = 0) -> list[float]:
    """Return differences with exactly the given mean and a standard deviation of exactly 1."""
    sample = np.random.default_rng(seed).standard_normal(pairs)
    return list((sample - sample.mean()) / sample.std(ddof=1) + mean)


def test_levels_of_all_trials_sum_to_the_error() -> None:
    levels = [keep_level(number, 0) for number in range(1, 100_000)]
    assert 0.95 * ERROR * (1 - 0.389 / math.log(100_000)) < sum(levels) < ERROR
    assert levels == sorted(levels, reverse=True)
    assert keep_level(7, 3) == 3 * keep_level(7, 1) == 3 * keep_level(7, 0)


def test_looks_spend_the_whole_level(rule: TrialRule) -> None:
    assert sum(map(rule.spent, rule.looks)) == pytest.approx(LEVEL) and len(rule.looks) == 3
    assert rule.spent(rule.looks[0]) < rule.spent(rule.looks[1]) < rule.spent(rule.looks[2])
    assert TrialRule.of(LEVEL, 4).looks == (4,) and TrialRule.of(LEVEL, 4).spent(4) == LEVEL
    assert TrialRule.of(1e-6, None).looks[-1] > rule.looks[-1]


@pytest.mark.parametrize(("mean", "verdict"), [(-9.0, "better"), (9.0, "worse"), (0.1, "no difference found")])
def test_large_and_tiny_differences_end_early(rule: TrialRule, mean: float, verdict: str) -> None:
    judged = rule.judge(differences(mean, rule.looks[1]))
    assert judged is not None and judged.verdict == verdict and judged.text.startswith(verdict)
    assert judged.difference is not None and judged.difference.value == pytest.approx(mean)
    assert judged.difference.excludes_zero == (verdict != "no difference found")


def test_a_medium_difference_needs_the_last_look(rule: TrialRule) -> None:
    last = rule.looks[-1]
    assert rule.judge(differences(-0.9, rule.looks[0])) is None
    judged = rule.judge(differences(-0.3, last))
    assert judged is not None and judged.verdict == "no difference found"
    assert (
        f"a difference of {detectable(rule.spent(last), last):.4f} would have been found with a probability of 90%"
        in judged.text
    )


def test_one_pair_or_constant_differences_prove_nothing(rule: TrialRule) -> None:
    verdicts = [
        TrialRule.of(LEVEL, 1).judge([-0.5]),
        rule.judge([-0.5] * rule.looks[0]),
        rule.judge([0.0] * rule.looks[0]),
    ]
    assert [verdict.text for verdict in verdicts if verdict] == [
        "cannot tell: one pair cannot separate a difference from luck; the mean difference is -0.5000",
        "cannot tell: all pairs have the same difference; the mean difference is -0.5000",
        "no difference found: all pairs have equal losses",
    ]


def test_differences_are_found_with_the_stated_probability() -> None:
    level, pairs = 0.001, 8
    samples = np.random.default_rng(1).standard_normal((4000, pairs)) - detectable(level, pairs)
    verdicts = [TrialRule(level=level, looks=(pairs,)).judge(row.tolist()) for row in samples]
    better = [verdict is not None and verdict.verdict == "better" for verdict in verdicts]
    assert 0.88 < np.mean(better) < 0.92  # four standard errors


def test_a_trials_seeds_are_unique_and_stable() -> None:
    first, again, another_trial = ([*seeds_of(name)][:50] for name in ("run-1-2", "run-1-2", "run-1-3"))
    assert first == again and not {*first} & {*another_trial}


def test_rounding_does_not_give_a_verdict(rule: TrialRule) -> None:
    judged = rule.judge([0.1] * rule.looks[0])
    assert judged is not None and judged.verdict == "cannot tell"


@pytest.mark.parametrize(("diverged", "verdict"), [("candidate", "worse"), ("base", "cannot tell")])
def test_a_diverged_side_has_a_table(diverged: str, verdict: str) -> None:
    trial = Trial(revisions={"base": "a", "candidate": "b"}, trees={}, run=Path("runs/x"), sections={})
    runs = [(1.0 if side != diverged else math.inf, 0.1, 1e6) for side in ("base", "candidate")]
    table = TrialTable(trial=trial, notes=[], number=1, rule=TrialRule.of(LEVEL, 3), pairs=[runs] * 3)
    judged = table.judge()
    assert judged is not None and judged.text == f"{verdict}: the {diverged} diverged in 3 of 3 seeds"
    table = attrs.evolve(table, judgment=judged)
    assert table.record()["verdict"] == verdict and table.record()["step_time_ratio"] == [1.0, 1.0, 1.0]
    assert "peak memory, MB" in table.text()


def test_a_verdict_names_its_assumption() -> None:
    rule = TrialRule.of(LEVEL, 8)
    judged = rule.judge(differences(-9.0, 8))
    assert judged is not None and judged.text.endswith(f", {assumption(8)}")
    assert (
        assumption(8)
        == "if differences are roughly normal; 8 pairs may have missed events that occur in up to 31% of runs"
    )
    trial = Trial(revisions={"base": "a", "candidate": "b"}, trees={}, run=Path("runs/x"), sections={})
    pairs = [[(1.0, 0.1, 1e6), (1.0 + more / 9, 0.1, 1e6)] for more in differences(-9.0, 8)]
    table = TrialTable(trial=trial, notes=[], number=1, rule=rule, pairs=pairs)
    table = attrs.evolve(table, judgment=table.judge())
    assert table.record()["assumption"] == assumption(8) and f"All intervals are valid {assumption(8)}." in table.text()


@pytest.mark.parametrize("pairs", [3, 8, 29])
def test_the_unseen_share_is_correct(pairs: int) -> None:
    share = int(assumption(pairs).partition("up to ")[2].partition("%")[0]) / 100
    assert (1 - share) ** pairs == pytest.approx(0.05, abs=0.01)
