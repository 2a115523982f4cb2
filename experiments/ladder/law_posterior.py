"""The posterior distribution of a loss law's parameters: weighted samples of the laws that explain the points.

For given exponents, the law is linear in E, A and B (variable projection, Golub and Pereyra 1973). If the size of the
noise is unknown, the distribution of E, A and B is therefore a Student's t in closed form. Laws are drawn from this
distribution for each pair of exponents on a grid, and for each possible correlation between the horizons of a trunk.
Only laws with positive E, A and B have weight.

The priors are as follows. The logarithm of each exponent has a Student's t distribution around EXPONENT. E and the
values of the other two terms at the center of the ladder are uniform. The correlation is one of the keys of SHARED,
with the weight given there. The variance of the noise is scaled inverse chi-squared around NOISE or NOISE_OF_ONE_SEED.
"""

import math

import attrs
import numpy as np

from common.errors import BadInput

# Published exponents: 0.34 and 0.28 (Hoffmann et al., arXiv 2203.15556), 0.35 and 0.37 (Besiroglu et al., 2404.10102).
EXPONENT, EXPONENT_SPREAD = 0.37, 0.3  # prior of an exponent: its median, and the scale of its logarithm
EXPONENT_FREEDOM = 4.0  # degrees of freedom; the heavy tails allow unusual exponents if a ladder supports them
# If an exponent is below this multiple of the grid's smallest exponent, the true exponent may be outside the grid.
NEAR_EDGE = 1.25
REACH = 4.0  # the first grid extends this many scales to both sides: exponents from 0.11 to 1.2
# The assumed relative standard deviation of the loss over seeds. The second value is for a ladder with a single seed:
# the runs of such a ladder say hardly anything about this deviation. benchmarks/forecast_coverage.py shows which
# values give the intervals the right coverage. The assumption has the same weight as NOISE_WEIGHT runs.
NOISE, NOISE_OF_ONE_SEED, NOISE_WEIGHT = 0.005, 0.008, 1.0
# All horizons of a trunk have a part of the noise in common. The keys are possible values of this part's share of the
# variance, and the values are their prior weights. The horizons have most of their training in common, so a large share
# is more likely.
SHARED = {0.1: 1.0, 0.5: 1.0, 0.85: 2.0, 0.95: 3.0}
GRID, DRAWS = 16, 16  # number of exponents on each axis, and number of laws drawn for each pair of exponents
REFINEMENTS = 6  # the grid is narrowed at most this many times, to the exponents that have weight
ENOUGH = 0.6  # the grid is fine enough if narrowing it would keep at least this share of each axis
# If no law is positive, every log weight is -infinity. This number then replaces the largest log weight.
LEAST_LOGARITHM = -1e300
LEAST_WEIGHT = 1e-4  # a refinement keeps exponents whose weight is at least this share of the largest weight


@attrs.frozen(kw_only=True)
class Observations:
    """The points of a ladder, as arrays of the same length."""

    sizes: np.ndarray  # logarithms of parameters, minus their mean
    tokens: np.ndarray  # logarithms of tokens, minus their mean
    losses: np.ndarray
    same_trunk: np.ndarray  # bool (points, points)
    noise: float  # assumed relative standard deviation


@attrs.frozen
class Laws:
    """Weighted laws, as arrays of the same length. `size_part` and `token_part` apply to the center of the ladder."""

    floor: np.ndarray  # E
    size_part: np.ndarray  # A / N^alpha at the center
    token_part: np.ndarray  # B / D^beta at the center
    alpha: np.ndarray
    beta: np.ndarray
    spread: np.ndarray  # standard deviation of a run's noise, as a share of the loss
    noise: np.ndarray  # random noise of a new run, as a share of the loss
    weight: np.ndarray

    def losses(self, size: float, tokens: float) -> np.ndarray:
        """Return the loss according to each law, without noise. The arguments are logarithms as in Observations."""
        size_part = self.size_part * np.exp(-self.alpha * size)
        return np.asarray(self.floor + size_part + self.token_part * np.exp(-self.beta * tokens))

    def edge_share(self) -> float:
        """Return the share, from 0 to 1, of laws with an exponent near the smallest exponent of the grid."""
        least = EXPONENT * math.exp(-REACH * EXPONENT_SPREAD)
        return float(self.weight[np.minimum(self.alpha, self.beta) < NEAR_EDGE * least].sum() / self.weight.sum())

    def quantiles(self, values: np.ndarray, *probabilities: float) -> list[float]:
        """Return weighted quantiles of `values`, which has one value for each law."""
        order = np.argsort(values)
        below = np.cumsum(self.weight[order]) - self.weight[order] / 2
        return [float(value) for value in np.interp(probabilities, below / self.weight.sum(), values[order])]


def explaining_laws(observed: Observations) -> Laws:
    """Return the laws that explain a ladder.

    Raise BadInput unless the loss decreases with size and also with tokens.
    """
    bounds = [(math.log(EXPONENT) - REACH * EXPONENT_SPREAD, math.log(EXPONENT) + REACH * EXPONENT_SPREAD)] * 2
    for _ in range(REFINEMENTS):
        axes = [np.linspace(*bound, GRID) for bound in bounds]
        exponents = np.exp(np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2))
        columns, weight = _draw(observed, exponents)
        if not weight.any():
            raise BadInput(
                "ladder: the loss must fall with size and also with tokens, but it does not, so no law explains it; "
                "look at the curves, lower the learning rates, or choose sizes and horizons that are farther apart"
            )
        shares = weight.reshape(len(SHARED), GRID, GRID, DRAWS).sum((0, 3))
        narrowed = [_narrowed(axis, shares.sum(1 - index)) for index, axis in enumerate(axes)]
        pairs = zip(narrowed, bounds, strict=True)
        if all(new[1] - new[0] >= ENOUGH * (old[1] - old[0]) for new, old in pairs):
            break
        bounds = narrowed
    heavy = weight > 1e-6 * weight.max()
    fields = [*columns.reshape(-1, 7)[heavy].T, weight[heavy] / weight[heavy].sum()]
    return Laws(*fields)


def _draw(observed: Observations, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return laws with the shape (SHARED, pairs, DRAWS, columns of Laws), and the weights of these laws.

    The weights are a flat array with values of at most 1.
    """
    generator = np.random.default_rng(0)
    draws = [_draw_given(observed, exponents, shared, generator) for shared in SHARED]
    prior = map(math.log, SHARED.values())
    logarithm = np.concatenate([weights + share for (_, weights), share in zip(draws, prior, strict=True)]).ravel()
    return np.stack([laws for laws, _ in draws]), np.exp(logarithm - max(logarithm.max(), LEAST_LOGARITHM))


def _draw_given(
    observed: Observations, exponents: np.ndarray, shared: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the laws for one correlation, (pairs, DRAWS, columns), and the logarithms of their weights.

    The logarithms have the shape (pairs, DRAWS). The logarithm is -infinity for a law that is not positive.
    """
    points, pairs = len(observed.losses), len(exponents)
    root = np.linalg.cholesky(np.where(observed.same_trunk, shared, 0.0) + (1 - shared) * np.eye(points))
    whiten = np.linalg.inv(root) / observed.losses  # divided by the losses, because the noise is relative
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
    alpha_beta = np.broadcast_to(exponents[:, None], (pairs, DRAWS, 2))
    laws = np.concatenate([parts, alpha_beta, spread[..., None], (spread * normal[..., 3])[..., None]], axis=-1)
    return laws, np.where((parts > 0).all(-1), logarithm[:, None], -np.inf)


def _narrowed(axis: np.ndarray, shares: np.ndarray) -> tuple[float, float]:
    """Return the bounds of the part of an axis that has weight, extended by one step on both sides."""
    heavy = np.nonzero(shares > LEAST_WEIGHT * shares.max())[0]
    return float(axis[max(heavy[0] - 1, 0)]), float(axis[min(heavy[-1] + 1, len(axis) - 1)])
