"""Bootstrap intervals cover what they promise, differences are paired, and unjudged questions are not guessed."""

import numpy as np
import pytest

from evaluation.shared import bootstrap
from evaluation.shared.bootstrap import paired_intervals


def session(draw: np.random.Generator, shape: tuple[int, int, int], seed_deviation: float = 0) -> np.ndarray:
    """Return scores of equal models, 0 to 100: most questions are hard for everybody, answers are noisy."""
    models, seeds, questions = shape
    scores = draw.beta(0.6, 2, questions) * 100 + draw.normal(0, 8, (models, 1, questions))
    scores = scores + draw.normal(0, 18, shape) + draw.normal(0, seed_deviation, (models, seeds, 1))
    return np.clip(scores, 0, 100)


@pytest.mark.parametrize(
    ("questions", "seeds", "models", "seed_deviation"),
    [(55, 1, 2, 0), (110, 2, 2, 1.7), (110, 3, 2, 1.7), (80, 1, 3, 0)],
)
def test_equal_models_are_not_told_apart_19_times_in_20(
    monkeypatch: pytest.MonkeyPatch, questions: int, seeds: int, models: int, seed_deviation: float
) -> None:
    for name in ("DRAWS", "CHUNK"):
        monkeypatch.setattr(bootstrap, name, 500)  # coverage does not need the decimals
    draw = np.random.default_rng(questions + seeds)
    winners = 0
    for _ in range(300):
        scores = session(draw, (models, seeds, questions), seed_deviation)
        _, differences = paired_intervals(scores)
        winners += any(found.apart for found in differences.values())
    assert winners <= 0.07 * 300


def test_a_difference_is_paired_by_question_and_found() -> None:
    draw = np.random.default_rng(0)
    hardness = draw.uniform(0, 100, 60)
    scores = np.stack([hardness + 2, hardness])[:, None] + draw.normal(0, 1, (2, 1, 60))
    means, differences = paired_intervals(scores)
    found = differences[0, 1]
    assert found.value == pytest.approx(means[0].value - means[1].value)
    assert 1 < found.low < found.value < found.high < 3
    assert means[0].high - means[0].low > 10  # though each alone is little known
    assert paired_intervals(scores) == (means, differences)
    assert paired_intervals(scores, seed=1) != (means, differences)


def test_of_few_normal_scores_the_interval_is_students() -> None:
    draw = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        scores = draw.normal(50, 10, 12)
        means, _ = paired_intervals(scores[None, None])
        student = 2 * 2.201 * scores.std(ddof=1) / 12**0.5
        ratios.append((means[0].high - means[0].low) / student)
    assert np.mean(ratios) == pytest.approx(1, abs=0.02)


def test_more_models_make_the_intervals_of_pairs_wider() -> None:
    scores = session(np.random.default_rng(0), (5, 1, 80))
    two, five = paired_intervals(scores[:2])[1][0, 1], paired_intervals(scores)[1][0, 1]
    assert five.low < two.low < two.high < five.high
    assert len(paired_intervals(scores)[1]) == 10


def test_what_was_not_judged_is_left_out_for_all_alike() -> None:
    scores = session(np.random.default_rng(0), (2, 2, 30))
    scores[:, 1, 4] = scores[:, :, 7] = np.nan
    means, _ = paired_intervals(scores)
    assert means[0].value == pytest.approx(np.nanmean(scores[0]))
    scores[0, 0, 9] = np.nan
    with pytest.raises(ValueError, match="the same ones judged"):
        paired_intervals(scores)
    with pytest.raises(ValueError, match="at least one judged"):
        paired_intervals(np.full((2, 1, 3), np.nan))


def test_one_question_has_a_value_and_no_interval() -> None:
    means, differences = paired_intervals(np.array([[[10.0]], [[4.0]]]))
    assert (means[0].value, differences[0, 1].value) == (10, 6)
    assert (means[0].low, differences[0, 1].high) == (None, None)
    assert paired_intervals(np.array([[[10.0, 20.0, 30.0]]]))[1] == {}
