"""Loss law: final loss as a function of parameters and tokens, fitted to a ladder, with intervals and refusals.

The law is L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, whose own fit of it had
stopped early: Besiroglu et al. 2024, arXiv 2404.10102). N counts weights in matrix products, the blocks' and the
head's: those of the 6 N of FLOPs, and the count by which nanochat's optima keep one ratio of tokens to parameters (its
dev/LOG.md). A table of embeddings does no work per token; counting it bends the law of small networks (Pearce and Song
2024, arXiv 2406.12907).

A ladder of nine runs hardly determines five parameters: a forecast is that of all laws which explain the ladder, by
weight, not that of the best one.
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
MOST_AT_EDGE = 0.15  # weight of laws at the edge of exponents, where no interval holds
MOST_MISS = 0.01  # of the held-out size: share of its loss


@attrs.frozen(kw_only=True)
class LossPoint:
    """Final loss of one run of a ladder; rung and seed name its WSD trunk, of which each horizon is a point."""

    rung: str  # size
    parameters: int  # N, weights in matrix products: matmul_parameter_count
    tokens: int  # D
    loss: float  # of validation, after the decay
    seed: int | None = None  # None: the mean over seeds


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
    """A law fitted to points; predicts with intervals."""

    points: tuple[LossPoint, ...]
    law: LossLaw  # medians of the laws' parameters, for people; a forecast is not computed from it
    noise: float  # standard deviation of a run's loss over seeds, as a share of the loss
    laws: Laws
    center: tuple[float, float]  # logarithms of N and D

    @property
    def compute(self) -> float:
        """Largest parameters x tokens of the ladder: a sixth of FLOPs."""
        return float(max(point.parameters * point.tokens for point in self.points))

    def predict(self, parameters: float, tokens: float) -> Interval:
        """Return the loss of one new run, with its 90 % interval: uncertainty of the law and noise of the run."""
        losses = self.laws.losses(math.log(parameters) - self.center[0], math.log(tokens) - self.center[1])
        tail = (1 - FORECAST_CONFIDENCE) / 2
        low, value, high = self.laws.quantiles(losses * (1 + self.laws.noise), tail, 0.5, 1 - tail)
        return Interval(value=value, low=low, high=high)


class NoForecast(BadInput):
    """A ladder that allows no forecast; its runs are kept."""


@attrs.frozen(kw_only=True)
class HeldOut:
    """Predictions of the largest size's losses, means over its seeds, by a law fitted to the others, by tokens."""

    points: tuple[LossPoint, ...]  # one for each horizon
    predicted: tuple[Interval, ...]

    @property
    def error(self) -> float:
        """Mean over horizons of the absolute misses, which do not cancel."""
        return sum(map(abs, self.misses)) / len(self.points)

    @property
    def misses(self) -> list[float]:
        """Predicted less measured at each horizon, as a share of the measured loss."""
        return [one.value / point.loss - 1 for one, point in zip(self.predicted, self.points, strict=True)]

    def text(self) -> str:
        """Return the misses in words, with the values of the longest horizon."""
        point = self.points[-1]
        misses = ", ".join(f"{100 * miss:+.2f}" for miss in self.misses)
        return (
            f"{point.rung} on {point.tokens:,} tokens, held out: predicted {self.predicted[-1].value:.4f}, measured "
            f"{point.loss:.4f}; missed by {misses} %" + (f", {100 * self.error:.2f} % on average" if misses else "")
        )


def fit_law(points: Sequence[LossPoint]) -> LawFit:
    """Fit the law to positive losses of two or more sizes and horizons. Raises BadInput where none explains them."""
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
    typical = LossLaw(
        floor=floor,
        size_factor=size_part * math.exp(alpha * center[0]),
        alpha=alpha,
        token_factor=token_part * math.exp(beta * center[1]),
        beta=beta,
    )
    return LawFit(points=tuple(points), law=typical, noise=spread, laws=laws, center=center)


def hold_out_largest(points: Sequence[LossPoint]) -> HeldOut:
    """Fit without the size of most parameters, one of three or more, and predict its points. Raises BadInput."""
    sizes = {point.parameters for point in points}
    fit = fit_law([point for point in points if point.parameters < max(sizes)])
    means = mean_points([point for point in points if point.parameters == max(sizes)])
    largest = sorted(means, key=lambda point: point.tokens)
    predicted = tuple(fit.predict(point.parameters, point.tokens) for point in largest)
    return HeldOut(points=tuple(largest), predicted=predicted)


def mean_points(points: Sequence[LossPoint]) -> list[LossPoint]:
    """Return a point for each size and horizon, in their order: the mean over seeds."""
    of_seeds: dict[tuple[int, int], list[LossPoint]] = {}
    for point in points:
        of_seeds.setdefault((point.parameters, point.tokens), []).append(point)
    return [
        attrs.evolve(each[0], loss=statistics.fmean(point.loss for point in each), seed=None)
        for each in of_seeds.values()
    ]


def refusal(held_out: HeldOut, fit: LawFit) -> str | None:
    """Return one line saying why no forecast is given, or None. `fit`: of all points."""
    if held_out.error <= MOST_MISS:
        if fit.laws.edge_share() <= MOST_AT_EDGE:
            return None
        return (
            f"the loss falls so slowly that exponents of {fit.law.alpha:.2g} of size and "
            f"{fit.law.beta:.2g} of tokens lie at the edge of the tested ones; add larger sizes and longer horizons"
        )
    return (
        f"the largest size, held out, was missed by {100 * held_out.error:.2f} % on average, wanted "
        f"within {100 * MOST_MISS:g} %; look at its curve, sweep its rates, or leave out the smallest size and add a "
        "larger one"
    )
