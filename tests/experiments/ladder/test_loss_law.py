"""The loss law of a ladder: its predictions, and the conditions under which there is no forecast."""

import math

import attrs
import forecast_coverage
import numpy as np
import pytest

from common.errors import BadInput
from evaluation.shared.significance import Interval
from experiments.ladder.loss_law import LossPoint, fit_law, hold_out_largest, refusal

TARGET = (5e8, 1e10)


def points(sizes: int = 4, noise: float = 0.002, seed: int = 0) -> list[LossPoint]:
    generator = np.random.default_rng(seed)
    return forecast_coverage.ladder(
        forecast_coverage.BESIROGLU, forecast_coverage.SHAPES[f"{sizes} sizes"], noise, 0.5, generator
    )


def width(interval: Interval) -> float:
    assert interval.low is not None and interval.high is not None
    assert interval.low < interval.value < interval.high
    return interval.high - interval.low


def test_a_noiseless_ladder_predicts_ten_times_its_compute() -> None:
    ladder = points(sizes=5, noise=0.0)
    fit = fit_law(ladder)
    size = math.sqrt(fit.compute * 10 / 20)
    truth = forecast_coverage.BESIROGLU(size, 20 * size)
    assert fit.predict(size, 20 * size).value == pytest.approx(truth, rel=0.005)
    loss = forecast_coverage.law(**attrs.asdict(fit.law))
    assert loss(size, 20 * size) == pytest.approx(truth, rel=0.01)
    for point in ladder:
        assert loss(point.parameters, point.tokens) == pytest.approx(point.loss, rel=0.005)


def test_intervals_widen_with_distance_and_with_noise() -> None:
    near, far = (width(fit_law(points()).predict(size, 20 * size)) for size in (2e8, 2e9))
    assert far > 2 * near
    noisy = fit_law(points(noise=0.01))
    assert noisy.noise > 1.5 * fit_law(points()).noise
    assert width(noisy.predict(2e8, 4e9)) > 1.5 * near


def test_a_forecast_does_not_depend_on_the_unit_of_the_loss() -> None:
    bits = [attrs.evolve(point, loss=point.loss / math.log(2)) for point in points()]
    forecast, in_bits = fit_law(points()).predict(*TARGET), fit_law(bits).predict(*TARGET)
    expected = [nats / math.log(2) for nats in (forecast.value, forecast.low or 0, forecast.high or 0)]
    assert [in_bits.value, in_bits.low, in_bits.high] == pytest.approx(expected, rel=1e-9)


def test_short_runs_are_not_mistaken_for_long_runs() -> None:
    fit = fit_law(points())
    losses = [fit.predict(1e8, tokens).value for tokens in (2e8, 1e9, 5e9, 2.5e10)]
    assert losses == sorted(losses, reverse=True)


def test_points_without_a_law_are_an_error() -> None:
    with pytest.raises(BadInput, match=r"^ladder: the loss must fall with size and also with tokens, but it does not"):
        fit_law([attrs.evolve(point, loss=9 - point.loss) for point in points()])


def test_the_largest_size_is_held_out() -> None:
    held_out = hold_out_largest(points(sizes=5, noise=0.001))
    assert {point.parameters for point in held_out.points} == {max(point.parameters for point in points(sizes=5))}
    assert 0 < held_out.error < 0.01 and refusal(held_out, fit_law(points(sizes=5, noise=0.001))) is None


def test_held_out_losses_do_not_affect_their_prediction() -> None:
    ladder = points(sizes=5, noise=0.001)
    changed = [attrs.evolve(point, loss=2 * point.loss) if point.parameters > 3e8 else point for point in ladder]
    assert hold_out_largest(changed).predicted == hold_out_largest(ladder).predicted


def test_a_held_out_miss_above_one_percent_is_refused() -> None:
    ladder = points(sizes=5, noise=0.001)
    largest = max(point.parameters for point in ladder)
    raised = [attrs.evolve(point, loss=point.loss * 1.03) if point.parameters == largest else point for point in ladder]
    line = refusal(hold_out_largest(raised), fit_law(raised))
    assert line is not None and "\n" not in line
    assert line.startswith("the prediction for the held-out largest size was wrong by 3.")
    assert "at most 1% is accepted; " in line
