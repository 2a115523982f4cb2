"""Verdicts of a sweep: each variant against the base, paired by seed, with simultaneous intervals.

Critical values are Dunnett's. Comparisons are all variants that were begun: one that a rule has stopped or that
diverged could have become a false winner, too.
"""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from evaluation.shared.significance import Interval, Runs, SeedNoise, dunnett_quantile, seed_noise

LOSS_DIGITS = 4


@attrs.frozen(kw_only=True)
class VariantResult:
    """Final validation losses of a variant."""

    name: str
    losses: Mapping[int, float | None]  # by seed; None: diverged. A seed whose run has not ended is absent
    stopped_at: int | None = None  # step where the rule has stopped it

    @property
    def runs(self) -> dict[int, float]:
        """Losses of the runs that did not diverge, by seed."""
        return {seed: loss for seed, loss in self.losses.items() if loss is not None}

    @property
    def diverged(self) -> int:
        """Number of runs that diverged."""
        return len(self.losses) - len(self.runs)

    def mean(self) -> float | None:
        """Return the mean over the seeds that have ended; None without one."""
        return float(np.mean([*self.runs.values()])) if self.runs else None


@attrs.frozen(kw_only=True)
class SweepVerdict:
    """A variant against the base."""

    text: str
    difference: Interval | None = None  # variant - base; None: no comparison


def judge_variants(base: VariantResult, variants: Sequence[VariantResult], seeds: Sequence[int]) -> list[SweepVerdict]:
    """Return the verdict on each variant. Without all runs there is none: looking early would raise the error."""
    missing = sum(len(set(seeds) - set(one.losses)) for one in (base, *variants) if one.stopped_at is None)
    compared = [one.runs for one in variants if one.stopped_at is None and not one.diverged]
    reason = None
    if missing:
        reason = f"no verdict yet: {missing} runs of the sweep are missing"
    elif base.diverged:
        reason = f"no verdict: the base diverged in {base.diverged} of {len(seeds)} seeds"
    elif len(seeds) < 2:
        reason = "no verdict: one seed"
    differences = iter([] if reason else compare_with_base(base.runs, compared, len(variants)))
    selected = any(one.stopped_at is not None for one in variants)
    verdicts = []
    for one in variants:
        if one.diverged:
            verdicts.append(SweepVerdict(text=f"diverged in {one.diverged} of {len(seeds)} seeds"))
        elif one.stopped_at is not None:
            verdicts.append(SweepVerdict(text=f"stopped at step {one.stopped_at:,} by the rule"))
        elif reason is not None:
            verdicts.append(SweepVerdict(text=reason))
        else:
            verdicts.append(_verdict(*next(differences), selected=selected))
    return verdicts


def compare_with_base(base: Runs, compared: Sequence[Runs], comparisons: int) -> list[tuple[Interval, SeedNoise]]:
    """Return each variant less the base: an interval that holds for all comparisons together, and its noise."""
    found = []
    for runs in compared:
        noise = seed_noise([base, *compared], runs, base)
        assert noise is not None, "the sweep has two seeds"
        reach = noise.reach(comparisons, dunnett_quantile(comparisons, noise.freedom))
        mean = float(np.mean([loss - base[seed] for seed, loss in runs.items()]))
        found.append((Interval(value=mean, low=mean - reach, high=mean + reach), noise))
    return found


def _verdict(difference: Interval, noise: SeedNoise, *, selected: bool) -> SweepVerdict:
    """Return a variant's verdict. `selected`: a rule has chosen it by these losses, so that its mean looks too good."""
    if noise.pooled == noise.own == 0:
        return SweepVerdict(
            text=f"no verdict: the seeds change no loss; the difference is {difference.value:+.{LOSS_DIGITS}f}"
        )
    text = f"no difference found: {difference.text(LOSS_DIGITS, '+')}"
    if difference.apart:
        better = difference.value < 0
        gain = -difference if better else difference
        size = f"at least {gain.low:.{LOSS_DIGITS}f}" if selected and better else gain.text(LOSS_DIGITS)
        text = f"{'better' if better else 'worse'} by {size}"
    return SweepVerdict(text=text, difference=difference)
