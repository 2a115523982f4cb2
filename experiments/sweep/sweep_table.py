"""The verdicts of a sweep, and its table, which is printed and written as Markdown and JSON.

A verdict compares a variant with the base. Runs are paired by seed. Dunnett's intervals account for all variants that
have started, including the variants that the rule has stopped, because each of them could have become a false winner.
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
from common.text import counted
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
from experiments.shared.experiment_files import LOSS_DIGITS, show_results
from experiments.sweep.sweep_file import Sweep, run_name
from training.telemetry.metrics_log import SWEEP, result_files

COLUMNS = ("variant", "runs", "validation loss", "verdict against the base")


@attrs.frozen(kw_only=True)
class VariantResult:
    """The final losses of a variant."""

    name: str
    # Losses by seed; None if the run diverged. A seed is left out if its run has not ended.
    losses: Mapping[int, float | None]
    stopped_at: int | None = None  # step at which the rule stopped the variant, if it did

    @property
    def runs(self) -> dict[int, float]:
        """The losses of the runs that did not diverge, by seed."""
        return {seed: loss for seed, loss in self.losses.items() if loss is not None}

    @property
    def diverged(self) -> int:
        """The number of runs that diverged."""
        return len(self.losses) - len(self.runs)

    def mean(self) -> float | None:
        """Return the mean loss of the runs that ended without diverging, or None if there are no such runs."""
        return float(np.mean([*self.runs.values()])) if self.runs else None


@attrs.frozen(kw_only=True)
class SweepVerdict:
    """The verdict on a variant, compared with the base."""

    text: str
    difference: Interval | None = None  # loss of the variant - loss of the base; None if the two were not compared


def judge_variants(base: VariantResult, variants: Sequence[VariantResult], seeds: Sequence[int]) -> list[SweepVerdict]:
    """Return the verdict on each variant.

    While runs are missing, no variants are compared, because an early look at the results would raise the error rate.
    """
    missing = sum(len(set(seeds) - set(variant.losses)) for variant in (base, *variants) if variant.stopped_at is None)
    compared = [variant.runs for variant in variants if variant.stopped_at is None and not variant.diverged]
    reason = None
    if missing:
        reason = f"no verdict yet: {missing} runs of the sweep are missing"
    elif base.diverged:
        reason = f"no verdict: the base diverged in {base.diverged} of {len(seeds)} seeds"
    elif len(seeds) < 2:
        reason = "no verdict: one seed"
    differences = iter([] if reason else compare_with_base(base.runs, compared, len(variants)))
    selected = any(variant.stopped_at is not None for variant in variants)
    verdicts = []
    for variant in variants:
        if variant.diverged:
            verdicts.append(SweepVerdict(text=f"diverged in {variant.diverged} of {len(seeds)} seeds"))
        elif variant.stopped_at is not None:
            verdicts.append(SweepVerdict(text=f"stopped at step {variant.stopped_at:,} by the rule"))
        elif reason is not None:
            verdicts.append(SweepVerdict(text=reason))
        else:
            verdicts.append(_verdict(*next(differences), selected=selected))
    return verdicts


def compare_with_base(base: Runs, compared: Sequence[Runs], comparisons: int) -> list[tuple[Interval, SeedNoise]]:
    """Return an interval for each variant's difference from the base, and the noise of this difference.

    The confidence of the intervals applies to all comparisons together.
    """
    differences = []
    for runs in compared:
        noise = seed_noise([base, *compared], runs, base)
        assert noise is not None, "the sweep has at least two seeds"
        reach = noise.reach(comparisons, dunnett_quantile(comparisons, noise.freedom))
        mean = float(np.mean([loss - base[seed] for seed, loss in runs.items()]))
        differences.append((Interval(value=mean, low=mean - reach, high=mean + reach), noise))
    return differences


@attrs.frozen(kw_only=True)
class SweepTable:
    """The results and verdicts of a sweep. The first result and the first verdict are the base's."""

    sweep: Sweep
    results: Sequence[VariantResult]
    verdicts: Sequence[SweepVerdict]
    warnings: Sequence[str] = ()  # about differences between the runs' records

    @classmethod
    def of(cls, sweep: Sweep, results: Sequence[VariantResult], warnings: Sequence[str] = ()) -> "SweepTable":
        base, *variants = results
        diverged = f", diverged in {base.diverged} of {len(sweep.seeds)} seeds" if base.diverged else ""
        verdicts = [SweepVerdict(text=f"the base{diverged}"), *judge_variants(base, variants, sweep.seeds)]
        return cls(sweep=sweep, results=results, verdicts=verdicts, warnings=warnings)

    def text(self, form: str = "simple") -> str:
        """Return the table and notes on how it was computed. `form` is a table format of tabulate."""
        rows = [self._row(result, verdict) for result, verdict in zip(self.results, self.verdicts, strict=True)]
        table = tabulate(rows, COLUMNS, form, colalign=("left", "right", "right", "left"), disable_numparse=True)
        return "\n".join([table, "", *self._notes()])

    def show(self, output: Path) -> None:
        """Print the table. Write sweep.md and sweep.json, unless they have results of runs that no longer exist."""
        if removed_runs := self._removed_runs(output):
            table_file, _ = result_files(output, SWEEP)
            note_text = f"{table_file}: not replaced, because it has results of runs that no longer exist: "
            show(*self.text().split("\n"), "", note_text + ", ".join(removed_runs))
        else:
            show_results(self.text, self.record, output, SWEEP, str(self.sweep.base))

    def _removed_runs(self, output: Path) -> list[str]:
        """Return the runs that are missing although an earlier table has their results."""
        _, record_file = result_files(output, SWEEP)
        try:
            variants = read_json(record_file)["variants"]
            recorded = {
                run_name(variant["name"], seed)
                for variant in variants
                # A variant that the rule stopped has no final losses, but it had runs.
                for seed in variant["losses"] or (self.sweep.seeds if variant.get("stopped_at") is not None else ())
            }
        except (BadInput, LookupError, TypeError):  # there is no earlier table, or it is damaged
            return []
        return [name for name in self._missing() if name in recorded]

    def _row(self, result: VariantResult, verdict: SweepVerdict) -> list[str]:
        mean, seeds, finite = result.mean(), len(self.sweep.seeds), len(result.runs)
        shown = "-" if mean is None else f"{mean:.{LOSS_DIGITS}f}" + (f" (of {finite})" if finite < seeds else "")
        return [result.name, f"{len(result.losses)}/{seeds}", shown, verdict.text]

    def _missing(self) -> list[str]:
        """Return the runs that have not ended, except the runs that the rule has stopped."""
        return [
            run_name(variant.name, seed)
            for variant, result in zip(self.sweep.variants, self.results, strict=True)
            for seed in self.sweep.seeds
            if seed not in result.losses and result.stopped_at is None
        ]

    def _deviation(self) -> tuple[float, int] | None:
        """Return the seed deviation behind the intervals, and its degrees of freedom; None if nothing was compared."""
        compared = [result for result, verdict in zip(self.results, self.verdicts, strict=True) if verdict.difference]
        if not compared:
            return None
        return residual_deviation([result.runs for result in (self.results[0], *compared)], paired=True)

    def _notes(self) -> list[str]:
        seeds, deviation = self.sweep.seeds, self._deviation()
        shown = ", ".join(map(str, seeds))
        loss = "Final validation loss in nats per token"
        if (measure := self.sweep.measure) is not None:
            loss = f"Final loss in {measure.unit} on {', '.join(map(str, measure.ranges))}"
        lines = [f"{loss}, mean over the seeds {shown}; lower is better."]
        if deviation is not None:
            lines += [
                f"Differences are paired by seed, with simultaneous {CONFIDENCE:.0%} intervals for "
                f"{counted(len(self.verdicts) - 1, 'comparison')}.",
                "A seed can shift the losses of all variants alike. Without this shift, the standard deviation of a "
                f"run's loss over seeds is {deviation[0]:.{LOSS_DIGITS}f} (degrees of freedom: {deviation[1]}).",
            ]
        if (rule := self.sweep.halving).rungs:
            rungs = ", ".join(f"{share:.0%}" for share in rule.rungs)
            continuing = f"the best 1/{rule.factor:g} of the variants continue"
            lines.append(f"Rule, set in advance: after {rungs} of the steps, {continuing}.")
            lines.append(
                "The variants that continued were chosen by these same losses, so their means look too good. For a "
                "gain, the table therefore has only a lower bound."
            )
        if missing := self._missing():
            lines.append(f"Missing: {', '.join(missing)}.")
        return [*lines, *self.warnings]

    def record(self) -> dict[str, Any]:
        """Return losses, verdicts and intervals by variant, and the seed deviation."""
        deviation = self._deviation()
        variants = [
            {
                "name": variant.name,
                "changes": variant.changes,
                "losses": {str(seed): result.losses[seed] for seed in self.sweep.seeds if seed in result.losses},
                "mean": result.mean(),
                "stopped_at": result.stopped_at,
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
            "seed_deviation": None if deviation is None else deviation[0],
            "warnings": list(self.warnings),
            "variants": variants,
        }


def describe_power(sweep: Sweep) -> str:
    """Return a sentence about the differences that the sweep can find with its number of seeds."""
    seeds, comparisons = len(sweep.seeds), len(sweep.variants) - 1
    if seeds < 2:
        return "no verdict is possible: one seed cannot separate a difference from luck"
    detectable, enough = detectable_deviations(comparisons, seeds), default_seeds(comparisons)
    more = f"; {enough} seeds find a difference of {SOUGHT_DEVIATIONS:g} seed deviations"
    advice = more if detectable > SOUGHT_DEVIATIONS else ""
    return (
        f"with {POWER:.0%} probability, {seeds} seeds find a difference of {detectable:.1f} seed deviations (a seed "
        "deviation is the standard deviation of a run's loss over seeds, without shifts that all variants share); "
        f"smaller differences are found less often{advice}"
    )


def _verdict(difference: Interval, noise: SeedNoise, *, selected: bool) -> SweepVerdict:
    """Return a variant's verdict.

    If a rule has `selected` the variant by these losses, the variant's mean looks too good. The verdict then states
    only a lower bound of the gain.
    """
    if noise.pooled == noise.pairwise == 0:
        reason = "no verdict: the loss is the same for all seeds; the difference is"
        return SweepVerdict(text=f"{reason} {difference.value:+.{LOSS_DIGITS}f}")
    text = f"no difference found: {difference.text(LOSS_DIGITS, '+')}"
    if difference.excludes_zero:
        better = difference.value < 0
        gain = -difference if better else difference
        size = f"at least {gain.low:.{LOSS_DIGITS}f}" if selected and better else gain.text(LOSS_DIGITS)
        text = f"{'better' if better else 'worse'} by {size}"
    return SweepVerdict(text=text, difference=difference)
