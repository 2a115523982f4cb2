"""The loss law: the final loss as a function of parameters and tokens, fitted to a ladder.

Predictions have intervals, and there is no forecast if the ladder does not support one.

The law is L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556; their fit had stopped too
early, as Besiroglu et al. showed in 2024, arXiv 2404.10102). N is the number of weights in matrix products, in the
blocks and in the head. It is the N in 6 N FLOPs per token. If parameters are counted in this way, nanochat's optima
have a constant ratio of tokens to parameters (its dev/LOG.md). The embedding table is not counted, because it needs no
arithmetic per token, and because counting it distorts the law of small networks (Pearce and Song 2024, arXiv
2406.12907).

A ladder of nine runs barely determines five parameters. A forecast is therefore a weighted average over all laws that
explain the ladder, and not the prediction of the best law.
"""

import math
import statistics
from collections.abc import Sequence

import attrs
import numpy as np

from common.errors import BadInput
from evaluation.shared.significance import Interval
from experiments.ladder.law_posterior import NOISE, NOISE_OF_ONE_SEED, Laws, Observations, explaining_laws

FORECAST_CONFIDENCE = 0.90
# Largest accepted weight of laws at the edge of the tested exponents. With a larger weight, intervals are wrong.
MOST_AT_EDGE = 0.15
MOST_MISS = 0.01  # largest accepted error for the held-out size, as a share of its loss


@attrs.frozen(kw_only=True)
class LossPoint:
    """The final loss of one run of a ladder.

    `rung` and `seed` identify its trunk, which is a run with the warmup_stable_decay schedule. Each horizon of a trunk
    gives one point.
    """

    rung: str  # name of the size
    parameters: int  # N, the weights in matrix products: matmul_parameter_count
    tokens: int  # D
    loss: float  # validation loss after the decay
    seed: int | None = None  # None for the mean over seeds


@attrs.frozen(kw_only=True)
class LossLaw:
    """L = floor + size_factor / N ** alpha + token_factor / D ** beta."""

    floor: float
    size_factor: float
    alpha: float
    token_factor: float
    beta: float


@attrs.frozen(kw_only=True)
class LawFit:
    """The laws that were fitted to the points of a ladder. They predict losses with intervals."""

    points: tuple[LossPoint, ...]
    law: LossLaw  # the median of each parameter; it is printed, but forecasts do not use it
    noise: float  # standard deviation of a run's loss over seeds, as a share of the loss
    laws: Laws
    center: tuple[float, float]  # means of the logarithms of N and D

    @property
    def compute(self) -> float:
        """The largest product of parameters and tokens of a run. The run's FLOPs are six times this product."""
        return float(max(point.parameters * point.tokens for point in self.points))

    def predict(self, parameters: float, tokens: float) -> Interval:
        """Return the loss of a single new run, with its 90% interval.

        The interval includes the uncertainty of the law and the noise of the run.
        """
        losses = self.laws.losses(math.log(parameters) - self.center[0], math.log(tokens) - self.center[1])
        tail = (1 - FORECAST_CONFIDENCE) / 2
        low, value, high = self.laws.quantiles(losses * (1 + self.laws.noise), tail, 0.5, 1 - tail)
        return Interval(value=value, low=low, high=high)


class NoForecast(BadInput):
    """The ladder does not support a forecast. Its runs are not deleted."""


@attrs.frozen(kw_only=True)
class HeldOut:
    """The losses of the largest size, as predicted by a law that was fitted to the smaller sizes.

    Points are means over the seeds of that size, in ascending order of tokens.
    """

    points: tuple[LossPoint, ...]  # one for each horizon
    predicted: tuple[Interval, ...]

    @property
    def error(self) -> float:
        """The mean absolute error over all horizons. Errors with opposite signs do not cancel."""
        return sum(map(abs, self.misses)) / len(self.points)

    @property
    def misses(self) -> list[float]:
        """The relative error at each horizon: (predicted - measured loss) / measured loss."""
        return [
            prediction.value / point.loss - 1 for prediction, point in zip(self.predicted, self.points, strict=True)
        ]

    def text(self) -> str:
        """Return a line with the losses at the longest horizon and the errors at all horizons."""
        point = self.points[-1]
        misses = ", ".join(f"{100 * miss:+.2f}" for miss in self.misses)
        return (
            f"{point.rung} on {point.tokens:,} tokens, held out: predicted {self.predicted[-1].value:.4f}, measured "
            f"{point.loss:.4f}; errors at all horizons: {misses}%"
            + (f", {100 * self.error:.2f}% on average" if misses else "")
        )


def fit_law(points: Sequence[LossPoint]) -> LawFit:
    """Fit the law to positive losses of at least two sizes and two horizons.

    Raise BadInput if no law explains the losses.
    """
    sizes = np.log([float(point.parameters) for point in points])
    tokens = np.log([float(point.tokens) for point in points])
    center = float(sizes.mean()), float(tokens.mean())
    trunks = np.array([f"{point.rung} {point.seed}" for point in points])
    observed = Observations(
        sizes=sizes - center[0],
        tokens=tokens - center[1],
        losses=np.array([point.loss for point in points]),
        same_trunk=trunks[:, None] == trunks[None, :],
        noise=NOISE if len(mean_points(points)) < len(points) else NOISE_OF_ONE_SEED,
    )
    laws = explaining_laws(observed)
    columns = (laws.floor, laws.size_part, laws.alpha, laws.token_part, laws.beta, laws.spread)
    floor, size_part, alpha, token_part, beta, spread = (laws.quantiles(column, 0.5)[0] for column in columns)
    median_law = LossLaw(
        floor=floor,
        size_factor=size_part * math.exp(alpha * center[0]),
        alpha=alpha,
        token_factor=token_part * math.exp(beta * center[1]),
        beta=beta,
    )
    return LawFit(points=tuple(points), law=median_law, noise=spread, laws=laws, center=center)


def hold_out_largest(points: Sequence[LossPoint]) -> HeldOut:
    """Fit the law to all sizes except the largest, and predict the largest size's points.

    There must be at least three sizes. Raise BadInput if no law explains the smaller sizes.
    """
    sizes = {point.parameters for point in points}
    fit = fit_law([point for point in points if point.parameters < max(sizes)])
    means = mean_points([point for point in points if point.parameters == max(sizes)])
    largest = sorted(means, key=lambda point: point.tokens)
    predicted = tuple(fit.predict(point.parameters, point.tokens) for point in largest)
    return HeldOut(points=tuple(largest), predicted=predicted)


def mean_points(points: Sequence[LossPoint]) -> list[LossPoint]:
    """Return the mean over seeds for each size and horizon, in the order of the points."""
    points_by_run: dict[tuple[int, int], list[LossPoint]] = {}
    for point in points:
        points_by_run.setdefault((point.parameters, point.tokens), []).append(point)
    return [
        attrs.evolve(seed_points[0], loss=statistics.fmean(point.loss for point in seed_points), seed=None)
        for seed_points in points_by_run.values()
    ]


def refusal(held_out: HeldOut, fit: LawFit) -> str | None:
    """Return the reason why there is no forecast, or None if there is one. `fit` is the fit to all points."""
    if held_out.error <= MOST_MISS:
        if fit.laws.edge_share() <= MOST_AT_EDGE:
            return None
        return (
            f"the loss falls so slowly that the exponents ({fit.law.alpha:.2g} for size and {fit.law.beta:.2g} for "
            "tokens) are at the edge of the tested range; add larger sizes and longer horizons"
        )
    return (
        f"the prediction for the held-out largest size was wrong by {100 * held_out.error:.2f}% on average, but at "
        f"most {100 * MOST_MISS:g}% is accepted; look at the curve of this size, sweep its learning rates, or leave "
        "out the smallest size and add a larger one"
    )
