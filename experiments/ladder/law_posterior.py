"""Posterior distribution of a loss law's parameters: all laws that explain the points, by weight.

For given exponents the law is linear in E, A and B (variable projection, Golub and Pereyra 1973), so that under noise
of unknown size their distribution is Student's t in closed form. It is drawn from on a grid of exponents, cut to
positive E, A and B, and summed over the correlation of a trunk's horizons.

Prior: the logarithm of each exponent is Student's t around EXPONENT; E and the two other terms at the center of the
ladder are uniform; the correlation is one of SHARED, by their weights; the noise is scaled inverse chi-squared around
NOISE, or NOISE_OF_ONE_SEED.
"""

import math

import attrs
import numpy as np

from common.errors import BadInput

# Published exponents: 0.34 and 0.28 (Hoffmann et al., arXiv 2203.15556), 0.35 and 0.37 (Besiroglu et al., 2404.10102).
EXPONENT, EXPONENT_SPREAD = 0.37, 0.3  # median; scale of the logarithm
EXPONENT_FREEDOM = 4.0  # Student's t: exponents far off stay possible where a ladder speaks for them
NEAR_EDGE = 1.25  # times the least exponent: where the prior may hide a smaller one
REACH = 4.0  # of the first grid, scales on both sides: exponents of 0.11 to 1.2
# Relative standard deviation over seeds, as assumed of a ladder of several seeds, and of one, which tells little of it:
# benchmarks/forecast_coverage.py shows which values make the intervals hold. The runs that the assumption is worth.
NOISE, NOISE_OF_ONE_SEED, NOISE_WEIGHT = 0.005, 0.008, 1.0
# Share of the noise's variance that the horizons of one trunk have in common: weight. They have most of their training
# in common, so a large share is likelier.
SHARED = {0.1: 1.0, 0.5: 1.0, 0.85: 2.0, 0.95: 3.0}
GRID, DRAWS = 16, 16  # exponents on each axis; laws drawn for each pair
REFINEMENTS = 6  # of the grid, to where the weight is, at most
ENOUGH = 0.6  # share of both axes with weight, after which the grid is fine enough
LEAST_LOGARITHM = -1e300  # of a weight: more than that of laws that are not positive
LEAST_WEIGHT = 1e-4  # of the heaviest exponent: to be kept by a refinement


@attrs.frozen(kw_only=True)
class Observations:
    """A ladder as arrays of one length."""

    sizes: np.ndarray  # logarithm of parameters, less its mean
    tokens: np.ndarray  # the same of tokens
    losses: np.ndarray
    same_trunk: np.ndarray  # bool (points, points)
    noise: float  # assumed


@attrs.frozen
class Laws:
    """Laws by weight, arrays of one length; the factors hold at the ladder's center."""

    floor: np.ndarray  # E
    size_part: np.ndarray  # A / N^alpha at the center
    token_part: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray
    spread: np.ndarray  # standard deviation of a run's noise, as a share of the loss
    noise: np.ndarray  # of one new run
    weight: np.ndarray

    def losses(self, size: float, tokens: float) -> np.ndarray:
        """Return the loss by each law, without noise; arguments as in Observations."""
        size_part = self.size_part * np.exp(-self.alpha * size)
        return np.asarray(self.floor + size_part + self.token_part * np.exp(-self.beta * tokens))

    def edge_share(self) -> float:
        """Return the weight of laws of which an exponent is hardly above the least of the grid, 0 to 1."""
        least = EXPONENT * math.exp(-REACH * EXPONENT_SPREAD)
        return float(self.weight[np.minimum(self.alpha, self.beta) < NEAR_EDGE * least].sum() / self.weight.sum())

    def quantiles(self, values: np.ndarray, *probabilities: float) -> list[float]:
        """Return weighted quantiles of a value of each law."""
        order = np.argsort(values)
        below = np.cumsum(self.weight[order]) - self.weight[order] / 2
        return [float(value) for value in np.interp(probabilities, below / self.weight.sum(), values[order])]


def explaining_laws(observed: Observations) -> Laws:
    """Return the laws that explain a ladder. Raises BadInput where loss does not fall with size and tokens."""
    bounds = [(math.log(EXPONENT) - REACH * EXPONENT_SPREAD, math.log(EXPONENT) + REACH * EXPONENT_SPREAD)] * 2
    for _ in range(REFINEMENTS):
        axes = [np.linspace(*bound, GRID) for bound in bounds]
        exponents = np.exp(np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2))
        columns, weight = _draw(observed, exponents)
        if not weight.any():
            raise BadInput(
                "ladder: the loss does not fall with both size and tokens, so no law explains it; look at the curves, "
                "lower the rates, or spread the sizes and horizons more"
            )
        shares = weight.reshape(len(SHARED), GRID, GRID, DRAWS).sum((0, 3))
        narrowed = [_narrowed(axis, shares.sum(1 - index)) for index, axis in enumerate(axes)]
        pairs = zip(narrowed, bounds, strict=True)
        if all(new[1] - new[0] >= ENOUGH * (old[1] - old[0]) for new, old in pairs):
            break
        bounds = narrowed
    kept = weight > 1e-6 * weight.max()
    fields = [*columns.reshape(-1, 7)[kept].T, weight[kept] / weight[kept].sum()]
    return Laws(*fields)


def _draw(observed: Observations, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return laws (SHARED, pairs, DRAWS, columns of Laws) and their weights, flat, the largest 1 or less."""
    generator = np.random.default_rng(0)
    drawn = [_draw_given(observed, exponents, shared, generator) for shared in SHARED]
    weights = map(math.log, SHARED.values())
    logarithm = np.concatenate([own + weight for (_, own), weight in zip(drawn, weights, strict=True)]).ravel()
    return np.stack([laws for laws, _ in drawn]), np.exp(logarithm - max(logarithm.max(), LEAST_LOGARITHM))


def _draw_given(
    observed: Observations, exponents: np.ndarray, shared: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return laws (pairs, DRAWS, columns) and logarithms of their weights (pairs, DRAWS) for one correlation."""
    points, pairs = len(observed.losses), len(exponents)
    root = np.linalg.cholesky(np.where(observed.same_trunk, shared, 0.0) + (1 - shared) * np.eye(points))
    whiten = np.linalg.inv(root) / observed.losses  # noise is relative
    alpha, beta = exponents.T[..., None]
    terms = np.stack(
        [np.ones((pairs, points)), np.exp(-alpha * observed.sizes), np.exp(-beta * observed.tokens)], axis=-1
    )
    basis, triangle = np.linalg.qr(whiten @ terms)  # (pairs, points, 3), (pairs, 3, 3)
    target = whiten @ observed.losses
    projected = np.einsum("gpi,p->gi", basis, target)
    squares = NOISE_WEIGHT * observed.noise**2 + np.maximum(target @ target - np.square(projected).sum(1), 0.0)
    freedom = NOISE_WEIGHT + points - 3
    inverse = np.linalg.inv(triangle)
    spread = np.sqrt(squares[:, None] / generator.chisquare(freedom, (pairs, DRAWS)))
    normal = generator.standard_normal((pairs, DRAWS, 4))
    parts = np.einsum("gij,gmj->gmi", inverse, projected[:, None] + spread[..., None] * normal[..., :3])
    logarithm = -freedom / 2 * np.log(squares) - np.log(np.abs(np.diagonal(triangle, axis1=1, axis2=2))).sum(1)
    logarithm -= np.log(np.diagonal(root)).sum()
    scaled = np.square(np.log(exponents / EXPONENT) / EXPONENT_SPREAD) / EXPONENT_FREEDOM
    logarithm -= (EXPONENT_FREEDOM + 1) / 2 * np.log1p(scaled).sum(1)
    both = np.broadcast_to(exponents[:, None], (pairs, DRAWS, 2))
    laws = np.concatenate([parts, both, spread[..., None], (spread * normal[..., 3])[..., None]], axis=-1)
    return laws, np.where((parts > 0).all(-1), logarithm[:, None], -np.inf)


def _narrowed(axis: np.ndarray, shares: np.ndarray) -> tuple[float, float]:
    """Return the part of a grid's axis that has weight, and a step on both sides."""
    heavy = np.nonzero(shares > LEAST_WEIGHT * shares.max())[0]
    return float(axis[max(heavy[0] - 1, 0)]), float(axis[min(heavy[-1] + 1, len(axis) - 1)])
