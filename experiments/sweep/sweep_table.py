"""Table of a sweep: losses and verdicts, printed, as Markdown and as JSON; the same bytes after any kill."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from tabulate import tabulate

from common.errors import BadInput
from common.json_files import read_json
from evaluation.shared.significance import (
    CONFIDENCE,
    POWER,
    SOUGHT_DEVIATIONS,
    default_seeds,
    detectable_deviations,
    residual_deviation,
)
from experiments.shared.experiment_files import counted, write_results
from experiments.sweep.sweep_file import Sweep, run_name
from experiments.sweep.verdicts import LOSS_DIGITS, SweepVerdict, VariantResult, judge_variants

COLUMNS = ("variant", "runs", "validation loss", "verdict against the base")


@attrs.frozen(kw_only=True)
class SweepTable:
    """Results and verdicts of a sweep. The first of both is the base's, without a comparison."""

    sweep: Sweep
    results: Sequence[VariantResult]
    verdicts: Sequence[SweepVerdict]

    @classmethod
    def of(cls, sweep: Sweep, results: Sequence[VariantResult]) -> "SweepTable":
        base, *variants = results
        diverged = f", diverged in {base.diverged} of {len(sweep.seeds)} seeds" if base.diverged else ""
        verdicts = [SweepVerdict(text=f"the base{diverged}"), *judge_variants(base, variants, sweep.seeds)]
        return cls(sweep=sweep, results=results, verdicts=verdicts)

    def text(self, form: str = "simple") -> str:
        """Return the table and its basis; `form`: of tabulate."""
        rows = [self._row(*of_variant) for of_variant in zip(self.results, self.verdicts, strict=True)]
        table = tabulate(rows, COLUMNS, form, colalign=("left", "right", "right", "left"), disable_numparse=True)
        return "\n".join([table, "", *self._notes()])

    def write(self, output: Path) -> str:
        """Write sweep.md and sweep.json, unless they hold runs that are here no more; return a line about it."""
        if gone := self._gone(output):
            return f"{output / 'sweep.md'}: kept as it is: it has results that are here no more: {', '.join(gone)}"
        markdown = f"# Sweep of {self.sweep.base}\n\n{self.text('github')}"
        return f"{write_results(output, 'sweep', markdown, self._record())}: this table"

    def _gone(self, output: Path) -> list[str]:
        """Return the missing runs of which an earlier table has the result."""
        try:
            variants = read_json(output / "sweep.json")["variants"]
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
        lines = [f"Final validation loss in nats per token, mean over the seeds {shown}; lower is better."]
        if found is not None:
            lines += [
                f"Differences are paired by seed, with simultaneous {CONFIDENCE:.0%} intervals for "
                f"{counted(len(self.verdicts) - 1, 'comparison')}.",
                "Deviation of one run over seeds, without what a seed does to all variants alike: "
                f"{found[0]:.{LOSS_DIGITS}f} (degrees of freedom: {found[1]}).",
            ]
        if (rule := self.sweep.halving) is not None:
            rungs = ", ".join(f"{share:.0%}" for share in rule.rungs)
            lines.append(f"Rule, stated beforehand: at {rungs} of the steps the best 1/{rule.factor:g} go on.")
            lines.append("Their means look too good, for they were chosen by them: a gain is stated by its bound.")
        if missing := self._missing():
            lines.append(f"Missing: {', '.join(missing)}.")
        return lines

    def _record(self) -> dict[str, Any]:
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
            "halving": None if self.sweep.halving is None else attrs.asdict(self.sweep.halving),
            "seed_deviation": None if found is None else found[0],
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
