"""Mixing law: the loss of a measured domain as a convex function of the weights of the training sources.

L(w) = c + exp(t . w), with the weights w on the simplex (Ye et al., data mixing laws, arXiv 2403.16952). For a
given floor c, log(L - c) is linear in w, so that under noise of unknown size t is Student's t around a weighted least
squares fit. Laws are drawn from the floors of a grid by how well they explain the losses. The draws carry what small
runs leave unknown to the optimum, as RegMix's regression (arXiv 2407.01492) does not.
"""

import attrs
import numpy as np

from evaluation.shared.significance import student_quantile

FLOORS = np.linspace(0.0, 0.95, 20)  # of the least loss; a uniform prior
DRAWS = 400
REFITS = 3  # of the weights of least squares
DESCENT_STEPS, DESCENT_RATE = 1500, 1.0
NEGLIGIBLE = 0.002


@attrs.frozen(kw_only=True)
class MixingLaws:
    """Draws of the law of one domain."""

    floor: np.ndarray  # (DRAWS,) nats per token, or bits per byte
    slopes: np.ndarray  # (DRAWS, sources)
    noise: np.ndarray  # (DRAWS,) deviation of a run's loss

    def losses(self, weights: np.ndarray) -> np.ndarray:
        """Return the loss by each draw, without noise (DRAWS, mixtures), of mixtures (mixtures, sources)."""
        return self.floor[:, None] + np.exp(self.slopes @ weights.T)


def fit_law(weights: np.ndarray, losses: np.ndarray, random: np.random.Generator) -> MixingLaws:
    """Return laws that explain the losses (runs,) of mixtures (runs, sources), of more runs than sources + 2."""
    runs, sources = weights.shape
    freedom = runs - sources - 1
    assert freedom > 1, "checked with the file"
    fits = []
    for floor in FLOORS * losses.min():
        above = losses - floor
        scale = above
        for _ in range(REFITS):  # a deviation of the logarithm counts in proportion to what is above the floor
            rows = weights * scale[:, None]
            slopes, *_ = np.linalg.lstsq(rows, np.log(above) * scale, rcond=None)
            scale = np.exp(weights @ slopes)
        squares = float(np.square(above - scale).sum())
        rows = weights * scale[:, None]
        fits.append((floor, slopes, np.linalg.inv(rows.T @ rows), squares))
    likelihood = np.array([-freedom / 2 * np.log(max(squares, 1e-300)) for *_, squares in fits])
    likelihood += np.array([np.linalg.slogdet(covariance)[1] / 2 for _, _, covariance, _ in fits])
    chosen = random.choice(len(fits), DRAWS, p=_normalized(likelihood))
    noise = np.sqrt(np.array([fits[one][3] for one in chosen]) / random.chisquare(freedom, DRAWS))
    roots = [np.linalg.cholesky(covariance) for _, _, covariance, _ in fits]
    normal = random.standard_normal((DRAWS, sources))
    slopes = [fits[one][1] + spread * roots[one] @ z for one, spread, z in zip(chosen, noise, normal, strict=True)]
    return MixingLaws(floor=np.array([fits[one][0] for one in chosen]), slopes=np.array(slopes), noise=noise)


def optima(slopes: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Return the best weights (draws, sources) for the sum of domains' laws: `slopes` (draws, domains, sources).

    Exponentiated gradient (Kivinen and Warmuth 1997), which stays on the simplex; floors do not move an optimum.
    """
    weights = np.full((len(slopes), slopes.shape[2]), 1 / slopes.shape[2])
    spread = np.ptp(slopes, axis=2).max(1, keepdims=True)
    rate = DESCENT_RATE / np.maximum(1.0, spread) ** 2  # a larger one oscillates
    for _ in range(DESCENT_STEPS):
        pull = importance * np.exp(np.einsum("mds,ms->md", slopes, weights))
        gradient = np.einsum("md,mds->ms", pull, slopes) / pull.sum(1, keepdims=True)
        weights *= np.exp(-rate * (gradient - (gradient * weights).sum(1, keepdims=True)))
        weights /= weights.sum(1, keepdims=True)
    weights[weights < NEGLIGIBLE] = 0  # which it only comes near
    return weights / weights.sum(1, keepdims=True)


def scale_of(draws: np.ndarray, freedom: float) -> np.ndarray:
    """Return the standard error (columns,) of draws (DRAWS, columns) from Student's t, by their middle."""
    low, high = np.quantile(draws, [0.16, 0.84], axis=0)
    return np.asarray((high - low) / 2 / student_quantile(0.84, freedom))


def simultaneous_bounds(draws: np.ndarray, confidence: float) -> np.ndarray:
    """Return low and high (2, columns) that hold all columns of a draw (draws, columns) together."""
    ranks = (draws.argsort(0).argsort(0) + 0.5) / len(draws)
    reach = float(np.quantile(np.abs(ranks - 0.5).max(1), confidence))
    return np.stack([np.quantile(draws, end, axis=0) for end in (0.5 - reach, 0.5 + reach)])


def _normalized(logarithms: np.ndarray) -> np.ndarray:
    shares = np.exp(logarithms - logarithms.max())
    return shares / shares.sum()
