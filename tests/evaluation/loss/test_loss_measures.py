"""Losses on the same text are compared group by group."""

import numpy as np

from evaluation.loss.loss_measures import LossSample, in_groups, loss_difference


def test_equal_models_differ_in_1_of_20_comparisons() -> None:
    draw = np.random.default_rng(0)
    apart = 0
    for _ in range(200):
        tokens = draw.integers(50, 2000, 300).astype(float)
        hardness = draw.normal(3.5, 0.6, 300)
        samples = []
        for _ in range(2):
            groups = in_groups((hardness + draw.normal(0, 0.1, 300)) * tokens, tokens, tokens)
            sample = LossSample(nats=np.array(groups.nats), tokens=np.array(groups.tokens, float), is_gpjt_range=False)
            samples.append(sample)
        apart += loss_difference(samples[:1], samples[1:], 0.95).apart
    assert 3 <= apart <= 18  # 10 of 200


def test_of_one_group_the_difference_has_no_interval() -> None:
    a, b = (LossSample(nats=np.array([nats]), tokens=np.array([10.0]), is_gpjt_range=False) for nats in (34.0, 30.0))
    found = loss_difference([a], [b], 0.95)
    assert (round(found.value, 9), found.low, found.high) == (0.4, None, None)
