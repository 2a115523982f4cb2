"""Verdicts of a sweep: each variant against the base, paired by seed, with simultaneous intervals.

The final validation losses are a two-way layout, variant and seed: what a seed does to all variants alike cancels in
the differences. The error is the residual, pooled over variants; critical values are those of dunnett.py. They count
every variant that was begun: one that a rule has stopped or that diverged could have become a false winner, too.
"""

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from evaluation.shared.significance import Interval
from experiments.sweep.dunnett import POWER, detectable_errors, dunnett_quantile, own_quantile

DIGITS = 4
STOPPED = "stopped at step"  # begins the verdict on a loser of the rule


@attrs.frozen(kw_only=True)
class VariantResult:
    """Final validation losses of a variant."""

    name: str
    losses: Mapping[int, float | None]  # by seed; None: diverged. A seed whose run has not ended is absent
    stopped_at: int | None = None  # step where the rule has stopped it

    @property
    def diverged(self) -> int:
        return sum(loss is None for loss in self.losses.values())

    def mean(self) -> float | None:
        """Return the mean over the seeds that have ended; None without one."""
        values = [loss for loss in self.losses.values() if loss is not None]
        return float(np.mean(values)) if values else None


@attrs.frozen(kw_only=True)
class SweepVerdict:
    """A variant against the base."""

    text: str
    difference: Interval | None = None  # variant - base; None: no comparison
    significant: bool = False


def judge_variants(base: VariantResult, variants: Sequence[VariantResult], seeds: Sequence[int]) -> list[SweepVerdict]:
    """Return the verdict on each variant. Without all runs there is none: looking early would raise the error."""
    missing = sum(len(set(seeds) - set(one.losses)) for one in (base, *variants) if one.stopped_at is None)
    lost = [_without_comparison(one, len(seeds)) for one in variants]
    compared = [one for one, text in zip(variants, lost, strict=True) if text is None]
    if missing:
        found = [SweepVerdict(text=f"no verdict yet: {missing} runs of the sweep are missing")] * len(compared)
    elif len(seeds) < 2 or base.diverged:
        reason = f"the base diverged in {base.diverged} of {len(seeds)} seeds" if base.diverged else "one seed"
        found = [SweepVerdict(text=f"no verdict: {reason}")] * len(compared)
    else:
        found = _compare(loss_matrix([base, *compared], seeds), len(variants))
    rest = iter(found)
    return [next(rest) if text is None else SweepVerdict(text=text) for text in lost]


def loss_matrix(results: Sequence[VariantResult], seeds: Sequence[int]) -> np.ndarray:
    """Return the losses of results that have all of them, float64 (variants, seeds)."""
    return np.array([[one.losses[seed] for seed in seeds] for one in results], np.float64)


def residual_deviation(losses: np.ndarray) -> float:
    """Return the standard deviation of a run over seeds, of losses (variants, seeds), without what seeds share."""
    effects = losses.mean(axis=1, keepdims=True) + losses.mean(axis=0, keepdims=True) - losses.mean()
    freedom = (losses.shape[0] - 1) * (losses.shape[1] - 1)
    return math.sqrt(float(np.square(losses - effects).sum()) / freedom)


def intervals(losses: np.ndarray, comparisons: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return differences from the base, half widths of their intervals, and standard errors.

    `losses` (variants, seeds): the first row is the base's. The wider one of Dunnett's interval and the variant's own.
    """
    seeds = losses.shape[1]
    differences = losses[1:] - losses[0]
    freedom = (losses.shape[0] - 1) * (seeds - 1)
    pooled = residual_deviation(losses) * math.sqrt(2 / seeds)
    own = differences.std(axis=1, ddof=1) / math.sqrt(seeds)
    reach = np.maximum(dunnett_quantile(comparisons, freedom) * pooled, own_quantile(comparisons, seeds) * own)
    return differences.mean(axis=1), reach, np.maximum(pooled, own)


def _compare(losses: np.ndarray, comparisons: int) -> list[SweepVerdict]:
    if len(losses) == 1:
        return []
    found = zip(*intervals(losses, comparisons), strict=True)
    return [
        _verdict(float(mean), float(reach), float(error), comparisons, losses.shape[1]) for mean, reach, error in found
    ]


def _verdict(mean: float, reach: float, error: float, comparisons: int, seeds: int) -> SweepVerdict:
    difference = Interval(value=mean, low=mean - reach, high=mean + reach)
    if error == 0:
        return SweepVerdict(text=f"no verdict: the seeds change no loss; the difference is {mean:+.{DIGITS}f}")
    if difference.apart:
        gain = -difference if mean < 0 else difference
        return SweepVerdict(
            text=f"{'better' if mean < 0 else 'worse'} by {gain.text(DIGITS)}", difference=difference, significant=True
        )
    seen = detectable_errors(comparisons, seeds) * error
    text = (
        f"no difference found: {difference.text(DIGITS, '+')}; one of {seen:.{DIGITS}f} is found in "
        f"{100 * POWER:.0f} of 100 sweeps, smaller ones less often"
    )
    return SweepVerdict(text=text, difference=difference)


def _without_comparison(result: VariantResult, seeds: int) -> str | None:
    """Return the verdict on a variant that has no final losses to compare; None where it has."""
    if result.diverged:
        return f"diverged in {result.diverged} of {seeds} seeds"
    return None if result.stopped_at is None else f"{STOPPED} {result.stopped_at:,} by the rule"
