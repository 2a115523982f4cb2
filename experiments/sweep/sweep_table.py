"""Verdicts of a sweep, each variant against the base, and its table: printed, as Markdown and as JSON.

Paired by seed, with Dunnett's intervals for all variants begun: a stopped one could have become a false winner, too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from tabulate import tabulate

from common.errors import BadInput
from common.json_files import read_json
from common.output import show
from evaluation.shared.significance import (
    CONFIDENCE,
    POWER,
    SOUGHT_DEVIATIONS,
    Interval,
    Runs,
    SeedNoise,
    default_seeds,
    detectable_deviations,
    dunnett_quantile,
    residual_deviation,
    seed_noise,
)
from experiments.shared.experiment_files import LOSS_DIGITS, with_count, show_results
from experiments.sweep.sweep_file import Sweep, run_name
from training.telemetry.metrics_log import SWEEP, result_files

COLUMNS = ("variant", "runs", "validation loss", "verdict against the base")


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


@attrs.frozen(kw_only=True)
class SweepTable:
    """Results and verdicts of a sweep. The first of both is the base's, without a comparison."""

    sweep: Sweep
    results: Sequence[VariantResult]
    verdicts: Sequence[SweepVerdict]
    warnings: Sequence[str] = ()  # on what the runs' records say

    @classmethod
    def of(cls, sweep: Sweep, results: Sequence[VariantResult], warnings: Sequence[str] = ()) -> "SweepTable":
        base, *variants = results
        diverged = f", diverged in {base.diverged} of {len(sweep.seeds)} seeds" if base.diverged else ""
        verdicts = [SweepVerdict(text=f"the base{diverged}"), *judge_variants(base, variants, sweep.seeds)]
        return cls(sweep=sweep, results=results, verdicts=verdicts, warnings=warnings)

    def text(self, form: str = "simple") -> str:
        """Return the table and its basis; `form`: of tabulate."""
        rows = [self._row(*of_variant) for of_variant in zip(self.results, self.verdicts, strict=True)]
        table = tabulate(rows, COLUMNS, form, colalign=("left", "right", "right", "left"), disable_numparse=True)
        return "\n".join([table, "", *self._notes()])

    def show(self, output: Path) -> None:
        """Print the table; write sweep.md and sweep.json, unless they hold runs that are here no more."""
        if gone := self._gone(output):
            table_file, _ = result_files(output, SWEEP)
            kept = f"{table_file}: kept as it is: it has results that are here no more: {', '.join(gone)}"
            show(*self.text().split("\n"), "", kept)
        else:
            show_results(self.text, self.record, output, SWEEP, str(self.sweep.base))

    def _gone(self, output: Path) -> list[str]:
        """Return the missing runs of which an earlier table has the result."""
        _, record_file = result_files(output, SWEEP)
        try:
            variants = read_json(record_file)["variants"]
            held = {
                run_name(variant["name"], seed)
                for variant in variants
                # those of the rule's losers have none at the end
                for seed in variant["losses"] or (self.sweep.seeds if "stopped at step" in variant["verdict"] else ())
            }
        except (BadInput, LookupError, TypeError):  # none, or damaged
            return []
        return [name for name in self._missing() if name in held]

    def _row(self, result: VariantResult, verdict: SweepVerdict) -> list[str]:
        mean, seeds, finite = result.mean(), len(self.sweep.seeds), len(result.runs)
        shown = "-" if mean is None else f"{mean:.{LOSS_DIGITS}f}" + (f" (of {finite})" if finite < seeds else "")
        return [result.name, f"{len(result.losses)}/{seeds}", shown, verdict.text]

    def _missing(self) -> list[str]:
        """Return the runs that have not ended, without those that the rule has stopped."""
        return [
            run_name(variant.name, seed)
            for variant, result in zip(self.sweep.variants, self.results, strict=True)
            for seed in self.sweep.seeds
            if seed not in result.losses and result.stopped_at is None
        ]

    def _deviation(self) -> tuple[float, int] | None:
        """Return the seed deviation behind the intervals, and its degrees of freedom; None without a comparison."""
        compared = [one for one, verdict in zip(self.results, self.verdicts, strict=True) if verdict.difference]
        if not compared:
            return None
        return residual_deviation([one.runs for one in (self.results[0], *compared)], paired=True)

    def _notes(self) -> list[str]:
        seeds, found = self.sweep.seeds, self._deviation()
        shown = ", ".join(map(str, seeds))
        loss = "Final validation loss in nats per token"
        if (measure := self.sweep.measure) is not None:
            loss = f"Final loss in {measure.unit} on {', '.join(map(str, measure.ranges))}"
        lines = [f"{loss}; mean over the seeds {shown}; lower is better."]
        if found is not None:
            lines += [
                f"Differences are paired by seed, with simultaneous {CONFIDENCE:.0%} intervals for "
                f"{with_count(len(self.verdicts) - 1, 'comparison')}.",
                "Deviation of one run over seeds, without what a seed does to all variants alike: "
                f"{found[0]:.{LOSS_DIGITS}f} (degrees of freedom: {found[1]}).",
            ]
        if (rule := self.sweep.halving).rungs:
            rungs = ", ".join(f"{share:.0%}" for share in rule.rungs)
            lines.append(f"Rule, stated beforehand: at {rungs} of the steps the best 1/{rule.factor:g} go on.")
            lines.append("Their means look too good, for they were chosen by them: a gain is stated by its bound.")
        if missing := self._missing():
            lines.append(f"Missing: {', '.join(missing)}.")
        return [*lines, *self.warnings]

    def record(self) -> dict[str, Any]:
        """Return losses, verdicts and intervals by variant, and the seed deviation."""
        found = self._deviation()
        variants = [
            {
                "name": variant.name,
                "changes": variant.changes,
                "losses": {str(seed): result.losses[seed] for seed in self.sweep.seeds if seed in result.losses},
                "mean": result.mean(),
                "verdict": verdict.text,
                "difference": None if verdict.difference is None else attrs.astuple(verdict.difference),
            }
            for variant, result, verdict in zip(self.sweep.variants, self.results, self.verdicts, strict=True)
        ]
        return {
            "base": str(self.sweep.base),
            "set": self.sweep.changes,
            "seeds": list(self.sweep.seeds),
            "halving": attrs.asdict(self.sweep.halving) if self.sweep.halving.rungs else None,
            "seed_deviation": None if found is None else found[0],
            "warnings": list(self.warnings),
            "variants": variants,
        }


def describe_power(sweep: Sweep) -> str:
    """Return the differences that this many seeds can find, as text."""
    seeds, comparisons = len(sweep.seeds), len(sweep.variants) - 1
    if seeds < 2:
        return "one seed gives no verdict: nothing tells a difference from luck"
    found, enough = detectable_deviations(comparisons, seeds), default_seeds(comparisons)
    more = f"; {enough} seeds find one of {SOUGHT_DEVIATIONS:g}" if found > SOUGHT_DEVIATIONS else ""
    return (
        f"with {POWER:.0%} probability {seeds} seeds find a difference of {found:.1f} seed deviations (the spread "
        f"of one run over seeds, without what a seed does to all variants alike), smaller ones less often{more}"
    )


def _verdict(difference: Interval, noise: SeedNoise, *, selected: bool) -> SweepVerdict:
    """Return a variant's verdict. `selected`: a rule has chosen it by these losses, so that its mean looks too good."""
    if noise.pooled == noise.own == 0:
        same = "no verdict: the seeds change no loss; the difference is"
        return SweepVerdict(text=f"{same} {difference.value:+.{LOSS_DIGITS}f}")
    text = f"no difference found: {difference.text(LOSS_DIGITS, '+')}"
    if difference.apart:
        better = difference.value < 0
        gain = -difference if better else difference
        size = f"at least {gain.low:.{LOSS_DIGITS}f}" if selected and better else gain.text(LOSS_DIGITS)
        text = f"{'better' if better else 'worse'} by {size}"
    return SweepVerdict(text=text, difference=difference)
