"""Comparisons of several variants with one base: family-wise critical values, and what so many seeds can find.

Dunnett (1955, JASA 50, 1096) bounds the largest of k statistics that share the base and one pooled error. It is more
powerful than Bonferroni or Holm, since it knows their correlation of 1/2. Yet the pooled error is wrong where one
variant, an unstable one, scatters more than the rest: simulated with five levers and seeds, one of five times the
deviation is a false winner in 14 % of sweeps. So a difference must also lie outside the paired t-interval of its own
differences over seeds, at the level alpha / k ** (2/3). Plain Bonferroni, alpha / k, would hold for any variances, but
needs a seed or two more; unadjusted, the family errs in up to 9 % where the base is the unstable one. The exponent is
our choice between the two: benchmarks/sweep_verdicts.py measures what it holds and finds.
"""

import math
from functools import cache

import numpy as np
from scipy import optimize, special

from evaluation.shared.significance import student_quantile

FAMILY_ERROR = 0.05  # probability of any false difference, where none is
OWN_EXPONENT = 2 / 3
POWER = 0.9
SOUGHT_DEVIATIONS = 3.0  # seed deviations that the default number of seeds finds
_NODES, _CELLS, _REACH = 96, 200, 8.5


@cache
def dunnett_quantile(comparisons: int, freedom: float) -> float:
    """Return the two-sided critical value of so many differences from one base, with equal numbers of seeds.

    P(max |T| <= c) = E over s and z of [Phi(sqrt(2) c s + z) - Phi(-sqrt(2) c s + z)] ** k, with z normal and s ** 2
    chi-squared over its degrees of freedom: multivariate t with correlations of 1/2, by Gauss-Legendre quadrature.
    """
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    base = _REACH * nodes
    density = _REACH * weights * np.exp(-base * base / 2) / math.sqrt(2 * math.pi)
    scale = np.sqrt(special.chdtri(freedom, 1 - (nodes + 1) / 2) / freedom)[:, None]

    def excess(critical: float) -> float:
        reach = math.sqrt(2) * critical * scale
        inside = special.ndtr(reach + base) - special.ndtr(-reach + base)
        return float(weights / 2 @ (inside**comparisons @ density)) - (1 - FAMILY_ERROR)

    return float(optimize.brentq(excess, 1.0, 1000.0))


def own_quantile(comparisons: int, seeds: int) -> float:
    """Return the critical value of a variant's own paired differences."""
    level = FAMILY_ERROR / comparisons**OWN_EXPONENT
    return student_quantile(1 - level / 2, seeds - 1)


@cache
def power(shift: float, comparisons: int, seeds: int) -> float:
    """Return the probability to find one difference of `shift` standard errors, all variants of equal variance.

    The sum of squares of the pooled error is that of the variant's own differences and an independent rest.
    """
    own, pooled = own_quantile(comparisons, seeds), dunnett_quantile(comparisons, comparisons * (seeds - 1))
    first = (np.arange(_CELLS) + 0.5) / _CELLS
    freedom, rest = seeds - 1, (comparisons - 1) * (seeds - 1)
    own_squares = special.chdtri(freedom, 1 - first)[:, None]
    rest_squares = special.chdtri(rest, 1 - first)[None, :] if rest else np.zeros((1, 1))
    reach = np.maximum(
        own * np.sqrt(own_squares / freedom), pooled * np.sqrt((own_squares + rest_squares) / (freedom + rest))
    )
    return float(np.mean(special.ndtr(shift - reach) + special.ndtr(-shift - reach)))


@cache
def detectable_errors(comparisons: int, seeds: int) -> float:
    """Return the difference, in standard errors of a difference, that is found with the probability POWER."""
    most = 1.0
    while power(most, comparisons, seeds) < POWER:
        most *= 2
    return float(optimize.brentq(lambda shift: power(shift, comparisons, seeds) - POWER, 0.0, most, xtol=1e-6))


def detectable_deviations(comparisons: int, seeds: int) -> float:
    """Return the same in seed deviations: standard deviations of one run's loss over seeds."""
    return detectable_errors(comparisons, seeds) * math.sqrt(2 / seeds)


def default_seeds(comparisons: int) -> int:
    """Return the fewest seeds that find a difference of SOUGHT_DEVIATIONS."""
    return next(seeds for seeds in range(2, 100) if detectable_deviations(comparisons, seeds) <= SOUGHT_DEVIATIONS)
