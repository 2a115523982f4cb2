"""Statistics: intervals have the stated coverage, critical values match tables, and equal models seldom differ."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_t

from evaluation.shared.significance import (
    ERROR,
    POWER,
    SOUGHT_DEVIATIONS,
    Interval,
    SeedNoise,
    combined_error,
    default_seeds,
    detectable_deviations,
    dunnett_quantile,
    hits_error,
    mean_and_error,
    plus_minus,
    power,
    prediction_band,
    ratio_freedom,
    residual_deviation,
    seed_noise,
    stream_mean,
    student_interval,
    student_quantile,
    two_way_intervals,
)


def test_intervals_are_negated_widened_and_printed() -> None:
    interval = Interval(value=2, low=-1, high=5)
    assert -interval == Interval(value=-2, low=-5, high=1)
    assert (
        not interval.excludes_zero
        and Interval(value=2, low=1, high=3).excludes_zero
        and Interval(value=-2, low=-3, high=-1).excludes_zero
    )
    unknown = Interval(value=2, low=None, high=None)
    assert not unknown.excludes_zero and -unknown == Interval(value=-2) and unknown.widened(1) == unknown
    assert Interval(value=0, low=-3, high=6).widened(4) == Interval(value=0, low=-5, high=52**0.5)
    assert (plus_minus(-0.04, None, 1), plus_minus(0.26, 0.14, 1)) == ("0.0", "0.3 ± 0.1")  # no negative zero
    assert (Interval(value=1, low=0.5, high=2).text(1), unknown.text(2)) == ("1.0 [0.5, 2.0]", "2.00")


def test_quantiles_match_a_table_of_students_t() -> None:  # values of a table
    for freedom, quantile in ((1, 12.706), (2, 4.303), (10, 2.228), (109, 1.982), (float("inf"), 1.960)):
        assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-4)
    interval = student_interval(2.0, 0.5, 10)
    assert [interval.low, interval.high] == pytest.approx([2 - 2.228 * 0.5, 2 + 2.228 * 0.5], abs=1e-3)
    assert student_interval(2.0, None, 0) == Interval(value=2.0)


def test_errors_of_means_and_sums_are_correct() -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0])
    assert mean_and_error(values * 10, np.full(4, 10.0)) == mean_and_error(values)
    assert mean_and_error(values) == (4.0, pytest.approx(values.std(ddof=1) / 2))
    assert mean_and_error(values[:1]) == (1.0, None)
    assert combined_error((3, 5), (4, 5)) == (5, pytest.approx(625 / (81 / 5 + 256 / 5)))
    assert combined_error((3, 5), (0, 1)) == (3, pytest.approx(5))


@pytest.mark.parametrize("documents", [3, 5, 30])
def test_loss_interval_covers_with_few_uneven_documents(documents: int) -> None:
    draw, tables = np.random.default_rng(documents), 2000
    inside = 0
    for _ in range(tables):
        tokens = np.round(np.exp(draw.normal(6.3, 1.0, documents))) + 1
        losses = 3.5 + draw.normal(0, 0.5, documents) + draw.normal(0, 1.5, documents) / np.sqrt(tokens)
        interval = student_interval(*mean_and_error(losses * tokens, tokens), ratio_freedom(tokens))
        inside += interval.low <= 3.5 <= interval.high
    assert 0.92 <= inside / tables <= 0.97


@pytest.mark.parametrize(("comparisons", "freedom"), [(2, 4), (3, 20), (5, 10), (9, 60)])
def test_dunnett_values_match_the_multivariate_t(comparisons: int, freedom: int) -> None:
    shape = np.full((comparisons, comparisons), 0.5) + 0.5 * np.eye(comparisons)
    reach = np.full(comparisons, dunnett_quantile(comparisons, freedom))
    inside = multivariate_t.cdf(reach, shape=shape, df=freedom, lower_limit=-reach, maxpts=200_000, random_state=0)
    assert inside == pytest.approx(0.95, abs=5e-4)


@pytest.mark.parametrize("comparisons", [1, 2, 5])
def test_default_seeds_are_the_fewest_with_enough_power(comparisons: int) -> None:
    seeds = default_seeds(comparisons)
    detectable = detectable_deviations(comparisons, seeds)
    assert detectable <= SOUGHT_DEVIATIONS < detectable_deviations(comparisons, seeds - 1)
    assert power(detectable / (2 / seeds) ** 0.5, comparisons, seeds) == pytest.approx(POWER, abs=1e-5)
    assert power(0.0, comparisons, seeds) < 0.05
    assert 8 <= default_seeds(999) <= 15


def test_shared_seeds_give_the_paired_t_test() -> None:
    first, second = {1: 4.0, 2: 4.3, 3: 5.1}, {1: 3.8, 2: 4.2, 3: 4.7, 9: 8.0}
    noise = seed_noise([first, second], first, second)
    error = np.std([0.2, 0.1, 0.4], ddof=1) / 3**0.5
    assert noise is not None and (noise.freedom, noise.pairwise_freedom) == (2, 2)
    assert (noise.pooled, noise.pairwise) == pytest.approx((error, error))
    assert noise.reach(1) == pytest.approx(4.303 * error, abs=1e-3)
    assert dunnett_quantile(1, 2) == pytest.approx(4.303, rel=1e-3)


def test_different_seeds_give_the_unpaired_test() -> None:
    first, second, third = {1: 1.0, 2: 3.0}, {3: 5.0, 4: 5.0, 5: 8.0}, {9: 9.0}
    assert residual_deviation([first, second, third], paired=False) == (pytest.approx((8 / 3) ** 0.5), 3)
    noise = seed_noise([first, second, third], first, second)
    assert noise is not None and noise.freedom == 3
    assert (noise.pooled, noise.pairwise) == pytest.approx(((8 / 3 * 5 / 6) ** 0.5, 2**0.5))  # Welch
    assert seed_noise([first, second, third], first, third) is None


def session(draw: np.random.Generator, shape: tuple[int, int, int], seed_deviation: float = 0) -> np.ndarray:
    """Return scores (0 to 100) of equally good models. Most questions are hard for all of them; answers are noisy."""
    models, seeds, questions = shape
    scores = draw.beta(0.6, 2, questions) * 100 + draw.normal(0, 8, (models, 1, questions))
    scores = scores + draw.normal(0, 18, shape) + draw.normal(0, seed_deviation, (models, seeds, 1))
    return np.clip(scores, 0, 100)


@pytest.mark.parametrize("deviation", [1.7, 8])
@pytest.mark.parametrize("shape", [(2, 2, 110), (3, 2, 500), (2, 3, 500), (2, 1, 110), (3, 1, 80)], ids=str)
def test_equal_models_seldom_differ(shape: tuple[int, int, int], deviation: float) -> None:
    draw, sessions = np.random.default_rng(sum(shape)), 400
    # If each model has only one fine-tuning run, there is never a winner.
    of_seeds = deviation if shape[1] > 1 else 0
    intervals = [two_way_intervals(session(draw, shape, of_seeds))[1].values() for _ in range(sessions)]
    assert (
        np.mean([any(interval.excludes_zero for interval in session_intervals) for session_intervals in intervals])
        <= 0.05 + 3 * (0.05 * 0.95 / sessions) ** 0.5
    )


def test_pairing_by_question_detects_a_small_difference() -> None:
    draw = np.random.default_rng(0)
    hardness = draw.uniform(0, 100, 60)
    scores = np.stack([hardness + 2, hardness])[:, None] + draw.normal(0, 1, (2, 1, 60))
    means, differences = two_way_intervals(scores)
    difference = differences[0, 1]
    assert difference.value == pytest.approx(means[0].value - means[1].value)
    assert 1 < difference.low < difference.value < difference.high < 3
    assert means[0].high - means[0].low > 10  # although each mean alone is uncertain


def test_unjudged_questions_are_left_out_for_all_models() -> None:
    scores = session(np.random.default_rng(0), (2, 2, 30))
    scores[:, 1, 4] = scores[:, :, 7] = np.nan
    means, _ = two_way_intervals(scores)
    assert means[0].value == pytest.approx(np.nanmean(scores[0]))
    scores[0, 0, 9] = np.nan
    with pytest.raises(ValueError, match="the same questions judged"):
        two_way_intervals(scores)
    with pytest.raises(ValueError, match="at least one judged"):
        two_way_intervals(np.full((2, 1, 3), np.nan))
    alone, differences = two_way_intervals(np.array([[[10.0]], [[4.0]]]))
    assert (alone[0], differences[0, 1]) == (Interval(value=10), Interval(value=6))


def neighbors(draw: np.random.Generator, shape: tuple[int, ...], correlation: float) -> np.ndarray:
    """Return normally distributed units with standard deviation 1. Each unit is correlated with the one before it."""
    units = draw.standard_normal(shape)
    for at in range(1, shape[-1]):
        units[..., at] = correlation * units[..., at - 1] + np.sqrt(1 - correlation**2) * units[..., at]
    return units


@pytest.mark.parametrize(("number", "correlation"), [(100, 0.8), (100, 0.95), (256, 0.5), (256, 0.95), (1500, 0.8)])
def test_interval_covers_despite_correlated_neighbors(number: int, correlation: float) -> None:
    draw, repeats = np.random.default_rng(number), 300
    sizes = np.ceil(20 * np.exp(draw.normal(0, 0.8, (repeats, number))))
    units = 3.5 + 0.4 * neighbors(draw, (repeats, number), correlation)
    inside = 0
    for levels, counts in zip(units, sizes, strict=True):
        mean = stream_mean(levels * counts, counts)
        interval = student_interval(mean.value, mean.error, mean.freedom)
        stored = student_interval(mean.value, mean.error_for(ratio_freedom(counts)), ratio_freedom(counts))
        assert [stored.low, stored.high] == pytest.approx([interval.low, interval.high])
        inside += interval.low <= 3.5 <= interval.high
    assert inside >= 0.85 * repeats


def test_independent_units_keep_the_plain_error() -> None:
    draw = np.random.default_rng(1)
    sizes = np.ceil(20 * np.exp(draw.normal(0, 0.8, (200, 300))))
    values = draw.normal(3.5, 0.4, (200, 300)) * sizes
    means = [stream_mean(row, size) for row, size in zip(values, sizes, strict=True)]
    same = [
        (mean.value, mean.error) == mean_and_error(row, size)
        for mean, row, size in zip(means, values, sizes, strict=True)
    ]
    assert np.mean(same) > 0.95 and means[0].independent == 300
    alike = stream_mean(neighbors(draw, (2000,), 0.9), np.ones(2000))
    assert alike.independent == pytest.approx(2000 * 0.1 / 1.9, rel=0.5)
    assert stream_mean(np.full(50, 2.0), np.ones(50)).error == 0 and stream_mean(np.ones(1), np.ones(1)).error is None


def test_band_of_three_runs_has_two_degrees_of_freedom() -> None:
    constant = np.array([[0.0], [1.0], [2.0]]) + np.zeros((3, 40))  # every run is constant
    low, high = prediction_band(constant, 4)
    assert high - 1 == pytest.approx(student_quantile(0.98, 2) * (4 / 3) ** 0.5)
    assert 1 - low == pytest.approx(high - 1)


def test_all_misses_still_have_an_error() -> None:
    none, half = np.zeros(200), np.arange(200) % 2
    assert hits_error(none, 1.0, paired=False) == pytest.approx((1 / 202 * 201 / 202 / 202) ** 0.5)
    assert hits_error(none + 1, 1.0, paired=False) == pytest.approx(hits_error(none, 1.0, paired=False))
    assert hits_error(none, 1.0, paired=True) == pytest.approx(1 / 202)
    assert hits_error(half, 1.0, paired=False) == mean_and_error(half)[1]  # two additional items make no difference
    assert hits_error(none - 0.25, 4.0, paired=False) == pytest.approx(4 * hits_error(none, 1.0, paired=False))


@pytest.mark.parametrize("seeds", [2, 3])
def test_judged_difference_must_exceed_its_seeds_noise(seeds: int) -> None:
    wide, narrow = np.linspace(-15, 15, seeds), np.linspace(-0.1, 0.1, seeds)
    scores = np.stack([wide, narrow, narrow + 1, narrow - 1, narrow])[:, :, None] + np.zeros(50)
    means, differences = two_way_intervals(scores)
    level = 0.12 if seeds == 2 else 0.03  # the first model clearly varies more than the others
    errors = [scores_of_model.std(ddof=1) / seeds**0.5 for scores_of_model in (wide, narrow)]
    error, freedom = combined_error(*((scores_of_model, seeds - 1) for scores_of_model in errors))
    pooled = student_quantile(0.9975, 5 * (seeds - 1)) * (2 / 5) ** 0.5 * errors[0]
    reach = max(student_quantile(1 - level / 2, freedom) * error, pooled)
    assert differences[0, 1].high == pytest.approx(reach, rel=0.01)
    own_reach = student_quantile(1 - level / 2, seeds - 1) * errors[0]
    assert means[0].high == pytest.approx(own_reach, rel=0.01) and means[0].high > 2 * means[1].high


NOISES = st.builds(
    SeedNoise,
    pooled=st.floats(1e-3, 10.0),
    freedom=st.integers(1, 6),
    pairwise=st.floats(1e-3, 10.0),
    pairwise_freedom=st.floats(1.0, 3.0),
)


@given(NOISES, st.floats(1e-3, 10.0), st.integers(2, 200))
def test_more_comparisons_never_narrow_an_interval(noise: SeedNoise, text: float, documents: int) -> None:
    """Holm's procedure relies on this: a difference that is significant among many pairs remains so among few."""
    widths = []
    for comparisons in range(1, 11):
        interval = student_interval(1.0, text, documents, 1 - ERROR / comparisons)
        widths.append(noise.added_to(interval, comparisons).high or 0.0)
    assert widths == sorted(widths) and widths[0] > 1.0


def test_seeds_that_scatter_alike_are_pooled() -> None:
    spread = np.array([-2.0, 0.0, 2.0])
    scores = np.stack([spread, spread + 1])[:, :, None] + np.zeros(50)
    _, differences = two_way_intervals(scores)
    reach = student_quantile(0.975, 4) * (2 * 2.0**2 / 3) ** 0.5
    assert differences[0, 1].high == pytest.approx(-1 + reach) and differences[0, 1].low == pytest.approx(-1 - reach)


def test_equal_models_seldom_differ_despite_an_unstable_one() -> None:
    draw, tables = np.random.default_rng(2), 1000
    deviations = np.array([15.0, 2.0, 2.0])[:, None, None]
    false = 0
    for _ in range(tables):
        scores = deviations * draw.standard_normal((3, 3, 1)) + draw.normal(0, 15, (3, 3, 40))
        false += any(interval.excludes_zero for interval in two_way_intervals(scores)[1].values())
    assert false <= 0.075 * tables  # at most 5% plus four standard errors; pooled variances would give 10%
