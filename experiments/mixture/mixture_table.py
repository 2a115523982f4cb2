"""Table of a mixture: the best weights of its sources, with intervals, and the gain over equal weights and one source.

The last runs are held out first: where their losses lie outside the law's prediction intervals, it recommends nothing.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from scipy import special
from tabulate import tabulate

from evaluation.shared.significance import ERROR, Interval, student_quantile
from experiments.mixture.mixing_law import fit_law, optima, scale_of, simultaneous_bounds
from experiments.mixture.mixture_file import MixtureDesign, held_out
from experiments.shared.experiment_files import LOSS_DIGITS

CONFIDENCE = 0.9  # of intervals
WEIGHT_DIGITS = 2


@attrs.frozen(kw_only=True)
class MixtureTable:
    """Losses of the mixtures, and the verdict on their weights."""

    mixture: MixtureDesign
    domains: Sequence[str]  # ranges that are measured
    shares: np.ndarray  # (domains,) of the loss that is minimized
    unit: str
    losses: np.ndarray  # (runs, domains), means over seeds; NaN: not known yet, or diverged
    verdict: str = ""
    best: Sequence[Interval] = ()  # weights, by source
    gains: Sequence[Interval] = ()  # over equal weights, and over the best source alone
    warnings: Sequence[str] = ()  # on what the runs' records say

    def judged(self) -> "MixtureTable":
        """Return the table with verdict and, where the law holds, optimum and gains."""
        weights = self.mixture.weights
        if missing := int(np.isnan(self.losses).any(1).sum()):
            verdict = f"No verdict: {missing} of {len(weights)} mixtures have no loss: not trained yet, or diverged."
            return attrs.evolve(self, verdict=verdict)
        outside, checked = check_held_out(weights, self.losses)
        if outside:
            verdict = f"No verdict: {outside} of {checked} held-out losses lie outside their prediction intervals: "
            advice = "no such law holds here; draw more runs, train longer, or measure more text."
            return attrs.evolve(self, verdict=verdict + advice)
        best, gains = find_optimum(weights, self.losses, self.shares)
        uniform, single = (gain.text(LOSS_DIGITS) for gain in gains)
        verdict = f"gain over equal weights {uniform}, over the best source alone {single} {self.unit}."
        found = "Best mixture: " if gains[0].apart else "No gain found: "
        return attrs.evolve(self, verdict=found + verdict, best=best, gains=gains)

    def text(self, form: str = "simple") -> str:
        """Return verdict, weights and their basis; `form`: of tabulate."""
        rows = [
            (name, weight.text(WEIGHT_DIGITS)) for name, weight in zip(self.mixture.sources, self.best, strict=False)
        ]
        table = [tabulate(rows, ("source", "best weight"), form, disable_numparse=True), ""] if rows else []
        loss = ", ".join(f"{share:.0%} {name}" for share, name in zip(self.shares, self.domains, strict=True))
        return "\n".join(
            [
                *(self.verdict, "", *table),
                f"Loss: {loss}, {self.unit}; {len(self.losses)} mixtures, {held_out(len(self.losses))} predicted.",
                f"Intervals: {CONFIDENCE:.0%}, of the weights all together, by the mixing law L = c + (q . w) ^ -b.",
                *self.warnings,
            ]
        )

    def record(self) -> dict[str, Any]:
        """Return weights and losses of the runs, the verdict, and the best weights with intervals."""
        return {
            "verdict": self.verdict,
            "warnings": list(self.warnings),
            "domains": list(self.domains),
            "unit": self.unit,
            "sources": list(self.mixture.sources),
            "weights": self.mixture.weights.tolist(),
            "losses": [[None if np.isnan(loss) else loss for loss in run] for run in self.losses.tolist()],
            "gains": [attrs.astuple(gain) for gain in self.gains],
            "columns": ["source", "best weight", "with its interval"],
            "variants": [
                {"name": name, "mean": weight.value, "difference": attrs.astuple(weight), "verdict": ""}
                for name, weight in zip(self.mixture.sources, self.best, strict=False)
            ],
        }


def find_optimum(weights: np.ndarray, losses: np.ndarray, shares: np.ndarray) -> tuple[list[Interval], list[Interval]]:
    """Return the best weights, with bounds that hold together, and their gains over equal weights and one source.

    weights (runs, sources), losses (runs, domains), shares (domains,) of the loss that is minimized.
    """
    random = np.random.default_rng(0)
    laws = [fit_law(weights, domain, random) for domain in losses.T]
    worth = np.stack([law.worth for law in laws], axis=1)  # (draws, domains, sources)
    exponents = np.stack([law.exponent for law in laws], axis=1)  # (draws, domains)
    all_draws = worth.reshape(1, -1, worth.shape[2]), exponents.reshape(1, -1), np.tile(shares, len(worth))
    best = optima(*all_draws)[0]  # for their mean
    bounds = simultaneous_bounds(optima(worth, exponents, shares), CONFIDENCE)
    points = np.stack([best, np.full(len(best), 1 / len(best)), *np.eye(len(best))])
    predicted = sum(share * law.losses(points) for share, law in zip(shares, laws, strict=True))  # (draws, points)
    single = 2 + int(predicted[:, 2:].mean(0).argmin())
    gains, freedom = predicted[:, [1, single]] - predicted[:, :1], len(weights) - len(best) - 2
    # The optimum was chosen by these losses: bounds that hold for all mixtures at once (Scheffe, Biometrika 40, 1953)
    critical = np.sqrt((len(best) - 1) * special.fdtri(len(best) - 1, freedom, CONFIDENCE))
    middle, reach = np.median(gains, axis=0), critical * scale_of(gains, freedom)
    return _intervals(best, bounds), _intervals(middle, np.stack([middle - reach, middle + reach]))


def check_held_out(weights: np.ndarray, losses: np.ndarray) -> tuple[int, int]:
    """Return how many losses of the last runs lie outside 95 % prediction intervals that hold together, and of all."""
    count = held_out(len(weights))
    checked, outside = count * losses.shape[1], 0
    freedom = len(weights) - count - weights.shape[1] - 2
    critical = student_quantile(1 - ERROR / checked / 2, freedom)
    for domain in losses.T:
        law = fit_law(weights[:-count], domain[:-count], random := np.random.default_rng(0))
        drawn = law.losses(weights[-count:])
        drawn += law.noise[:, None] * random.standard_normal(drawn.shape)
        reach = critical * scale_of(drawn, freedom)
        outside += int((np.abs(domain[-count:] - np.median(drawn, axis=0)) > reach).sum())
    return outside, checked


def _intervals(values: np.ndarray, bounds: np.ndarray) -> list[Interval]:
    """Return intervals of values (N,) with bounds (2, N)."""
    rows = np.stack([values, *bounds], axis=1).tolist()
    return [Interval(value=value, low=low, high=high) for value, low, high in rows]
