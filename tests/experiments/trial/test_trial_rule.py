"""Rule of a trial: levels that add up to the stated error, looks, verdicts of planted and of equal losses."""

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
    """Return differences with this mean and the deviation 1, exactly."""
    drawn = np.random.default_rng(seed).standard_normal(pairs)
    return list((drawn - drawn.mean()) / drawn.std(ddof=1) + mean)


def test_levels_of_all_trials_sum_to_the_error_until_one_is_kept() -> None:
    levels = [keep_level(number, 0) for number in range(1, 100_000)]
    assert 0.95 * ERROR * (1 - 0.389 / math.log(100_000)) < sum(levels) < ERROR
    assert levels == sorted(levels, reverse=True)
    assert keep_level(7, 3) == 3 * keep_level(7, 1) == 3 * keep_level(7, 0)


def test_looks_spend_the_level_and_a_stated_number_of_pairs_is_looked_at_once(rule: TrialRule) -> None:
    assert sum(map(rule.spent, rule.looks)) == pytest.approx(LEVEL) and len(rule.looks) == 3
    assert rule.spent(rule.looks[0]) < rule.spent(rule.looks[1]) < rule.spent(rule.looks[2])
    assert TrialRule.of(LEVEL, 4).looks == (4,) and TrialRule.of(LEVEL, 4).spent(4) == LEVEL
    assert TrialRule.of(1e-6, None).looks[-1] > rule.looks[-1]


@pytest.mark.parametrize(("mean", "verdict"), [(-9.0, "better"), (9.0, "worse"), (0.1, "no difference found")])
def test_a_large_difference_is_found_early_and_a_small_one_ends_early(
    rule: TrialRule, mean: float, verdict: str
) -> None:
    judged = rule.judge(differences(mean, rule.looks[1]))
    assert judged is not None and judged.verdict == verdict and judged.text.startswith(verdict)
    assert judged.difference is not None and judged.difference.value == pytest.approx(mean)
    assert judged.difference.apart == (verdict != "no difference found")


def test_a_difference_between_goes_on_to_the_last_look_which_names_what_would_have_been_found(rule: TrialRule) -> None:
    last = rule.looks[-1]
    assert rule.judge(differences(-0.9, rule.looks[0])) is None
    judged = rule.judge(differences(-0.3, last))
    assert judged is not None and judged.verdict == "no difference found"
    assert (
        f"one of {detectable(rule.spent(last), last):.4f} would have been found with a probability of 90%"
        in judged.text
    )


def test_nothing_is_told_from_one_pair_or_from_seeds_that_change_no_loss(rule: TrialRule) -> None:
    judged = [
        TrialRule.of(LEVEL, 1).judge([-0.5]),
        rule.judge([-0.5] * rule.looks[0]),
        rule.judge([0.0] * rule.looks[0]),
    ]
    assert [one.text for one in judged if one] == [
        "cannot tell: one pair cannot separate a difference from luck; the mean difference is -0.5000",
        "cannot tell: all pairs have the same difference; the mean difference is -0.5000",
        "no difference found: all pairs have equal losses",
    ]


def test_found_with_the_stated_probability() -> None:
    level, pairs = 0.001, 8
    drawn = np.random.default_rng(1).standard_normal((4000, pairs)) - detectable(level, pairs)
    judged = [TrialRule(level=level, looks=(pairs,)).judge(row.tolist()) for row in drawn]
    better = [one is not None and one.verdict == "better" for one in judged]
    assert 0.88 < np.mean(better) < 0.92  # four standard errors


def test_a_trial_has_seeds_of_its_own_the_same_at_each_call() -> None:
    one, again, other = ([*seeds_of(name)][:50] for name in ("run-1-2", "run-1-2", "run-1-3"))
    assert one == again and not {*one} & {*other}


def test_losses_that_no_seed_changes_give_no_verdict_by_rounding(rule: TrialRule) -> None:
    judged = rule.judge([0.1] * rule.looks[0])
    assert judged is not None and judged.verdict == "cannot tell"


@pytest.mark.parametrize(("diverged", "verdict"), [("candidate", "worse"), ("base", "cannot tell")])
def test_a_side_that_diverged_in_all_pairs_has_a_table_and_a_record(diverged: str, verdict: str) -> None:
    trial = Trial(revisions={"base": "a", "candidate": "b"}, trees={}, run=Path("runs/x"), sections={})
    runs = [(1.0 if side != diverged else math.inf, 0.1, 1e6) for side in ("base", "candidate")]
    table = TrialTable(trial=trial, notes=[], number=1, rule=TrialRule.of(LEVEL, 3), pairs=[runs] * 3)
    judged = table.judge()
    assert judged is not None and judged.text == f"{verdict}: the {diverged} diverged in 3 of 3 seeds"
    table = attrs.evolve(table, judgement=judged)
    assert table.record()["verdict"] == verdict and table.record()["step_time_ratio"] == [1.0, 1.0, 1.0]
    assert "peak memory, MB" in table.text()


def test_a_verdict_names_its_assumption() -> None:
    rule = TrialRule.of(LEVEL, 8)
    judged = rule.judge(differences(-9.0, 8))
    assert judged is not None and judged.text.endswith(f", {assumption(8)}")
    assert assumption(8).startswith("if differences are roughly normal; what happens in up to 31% of runs")
    trial = Trial(revisions={"base": "a", "candidate": "b"}, trees={}, run=Path("runs/x"), sections={})
    pairs = [[(1.0, 0.1, 1e6), (1.0 + more / 9, 0.1, 1e6)] for more in differences(-9.0, 8)]
    table = TrialTable(trial=trial, notes=[], number=1, rule=rule, pairs=pairs)
    table = attrs.evolve(table, judgement=table.judge())
    assert table.record()["assumption"] == assumption(8) and f"All intervals are valid {assumption(8)}." in table.text()


@pytest.mark.parametrize("pairs", [3, 8, 29])
def test_pairs_miss_an_outcome_with_the_stated_share(pairs: int) -> None:
    share = int(assumption(pairs).partition("up to ")[2].partition("%")[0]) / 100
    assert (1 - share) ** pairs == pytest.approx(0.05, abs=0.01)
