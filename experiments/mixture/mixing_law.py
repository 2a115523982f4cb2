"""Mixing law: the loss of a measured domain as a convex function of the weights of the training sources.

L(w) = c + (q . w) ^ -b, with the weights w on the simplex and q >= 0, the worth of a source's tokens for the domain: a
power law of the tokens of worth, as of one source's proportion in BiMix (arXiv 2405.14908). The exponential law of data
mixing laws (Ye et al., arXiv 2403.16952) is its limit of large b; that misses the steep rise of a loss where the one
source of worth is left out. For a given floor c and exponent b, (L - c) ^ (-1 / b) is linear in w, so that under noise
of unknown size q is Student's t around a weighted least squares fit. Laws are drawn from the floors and exponents of a
grid by how well they explain the losses, with Jeffreys' prior of q. The draws carry what small runs leave unknown to
the optimum, as RegMix's regression (arXiv 2407.01492) does not.
"""

import itertools

import attrs
import numpy as np

from evaluation.shared.significance import student_quantile

FLOORS = np.linspace(0.0, 0.95, 20)  # of the least loss; a uniform prior
EXPONENTS = np.geomspace(0.05, 8.0, 12)
DRAWS = 400
REFITS = 3  # of the weights of least squares
STEPS = 1500  # of the search for an optimum
NEGLIGIBLE = 0.002
LEAST_WORTH = 1e-6  # of that of the best source: no loss is infinite


@attrs.frozen(kw_only=True)
class MixingLaws:
    """Draws of the law of one domain."""

    floor: np.ndarray  # (draws,) nats per token, or bits per byte
    exponent: np.ndarray  # (draws,)
    worth: np.ndarray  # (draws, sources)
    noise: np.ndarray  # (draws,) deviation of a run's loss

    def losses(self, weights: np.ndarray) -> np.ndarray:
        """Return the loss by each draw, without noise (draws, mixtures), of mixtures (mixtures, sources)."""
        return self.floor[:, None] + (self.worth @ weights.T) ** -self.exponent[:, None]


def fit_law(weights: np.ndarray, losses: np.ndarray, random: np.random.Generator) -> MixingLaws:
    """Return laws that explain the losses (runs,) of mixtures (runs, sources), of more runs than sources + 3."""
    runs, sources = weights.shape
    freedom = runs - sources - 2
    assert freedom > 1, "checked with the file"
    fits = []
    for floor, exponent in itertools.product(FLOORS * losses.min(), EXPONENTS):
        above = losses - floor
        linear = worth_of = above ** (-1 / exponent)
        for _ in range(REFITS):  # a deviation of the linear form counts as that of the loss
            slope = exponent * worth_of ** (-exponent - 1)
            worth = _positive(np.linalg.lstsq(weights * slope[:, None], linear * slope, rcond=None)[0])
            worth_of = weights @ worth
        rows = weights * (exponent * worth_of ** (-exponent - 1))[:, None]
        squares = float(np.square(above - worth_of**-exponent).sum())
        fits.append((floor, exponent, worth, np.linalg.inv(np.linalg.cholesky(rows.T @ rows)).T, squares))
    likelihood = np.array([-freedom / 2 * np.log(max(squares, 1e-300)) for *_, squares in fits])
    shares = np.exp(likelihood - likelihood.max())
    chosen = [fits[one] for one in random.choice(len(fits), DRAWS, p=shares / shares.sum())]
    floors, exponents, middles, roots, squares_of = (np.array(column) for column in zip(*chosen, strict=True))
    noise = np.sqrt(squares_of / random.chisquare(freedom, DRAWS))
    drawn = middles + noise[:, None] * np.einsum("mij,mj->mi", roots, random.standard_normal((DRAWS, sources)))
    return MixingLaws(floor=floors, exponent=exponents, worth=_positive(drawn), noise=noise)


def optima(worth: np.ndarray, exponent: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Return the best weights (draws, sources) for the sum of domains' laws; floors do not move an optimum.

    `worth` (draws, domains, sources), `exponent` (draws, domains), `importance` (domains,) of a loss in the sum. A
    source's weight is multiplied by a power of its pull on the sum, as in expectation maximization, until all that are
    left pull alike; of domains with one source of worth each, a step is exact.
    """
    weights = np.full((len(worth), worth.shape[2]), 1 / worth.shape[2])
    for _ in range(STEPS):
        pull = importance * exponent * np.einsum("mds,ms->md", worth, weights) ** (-exponent - 1)
        weights *= np.einsum("md,mds->ms", pull, worth) ** (1 / (1 + exponent.max()))
        weights /= weights.sum(1, keepdims=True)
    weights[weights < NEGLIGIBLE] = 0  # which it only comes near
    return weights / weights.sum(1, keepdims=True)


def scale_of(draws: np.ndarray, freedom: float) -> np.ndarray:
    """Return the standard error (columns,) of draws (draws, columns) from Student's t, by their middle."""
    low, high = np.quantile(draws, [0.16, 0.84], axis=0)
    return np.asarray((high - low) / 2 / student_quantile(0.84, freedom))


def simultaneous_bounds(draws: np.ndarray, confidence: float) -> np.ndarray:
    """Return low and high (2, columns) that hold all columns of a draw (draws, columns) together."""
    ranks = (draws.argsort(0).argsort(0) + 0.5) / len(draws)
    reach = float(np.quantile(np.abs(ranks - 0.5).max(1), confidence))
    return np.stack([np.quantile(draws, end, axis=0) for end in (0.5 - reach, 0.5 + reach)])


def _positive(worth: np.ndarray) -> np.ndarray:
    """Return worths (..., sources) with the least of them in the place of smaller ones."""
    return np.maximum(worth, LEAST_WORTH * np.abs(worth).max(-1, keepdims=True))
