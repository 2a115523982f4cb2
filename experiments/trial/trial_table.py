"""The table of a trial, with loss, time and memory of both commits. It is printed and written as Markdown and JSON."""

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from tabulate import tabulate

from common.text import counted
from evaluation.shared.significance import CONFIDENCE, Interval, mean_and_error, student_interval
from experiments.shared.experiment_files import LOSS_DIGITS
from experiments.trial.trial import SIDES, Trial
from experiments.trial.trial_rule import VERDICTS, TrialRule, TrialVerdict, assumption

RATIO_DIGITS = 3
ALIGNED = ("left", "right", "right", "left")
# Each row has a title, a key in the record, an index in SideRun, a unit, and a number of digits.
ROWS = (
    ("validation loss", "loss_difference", 0, 1.0, LOSS_DIGITS),
    ("ms per step", "step_time_ratio", 1, 1e-3, 1),
    ("peak memory, MB", "memory_ratio", 2, 1e6, 1),
)
# A run's final loss in nats per token (infinite if it diverged), median seconds per step, and peak memory in bytes
SideRun = tuple[float | None, float | None, float | None]


@attrs.frozen(kw_only=True)
class TrialTable:
    """A trial, the pairs trained so far, and the verdict."""

    trial: Trial
    notes: Sequence[str]
    number: int = 0  # the trial's number among all trials of the project; 0 if the trial needs no pairs
    rule: TrialRule | None = None
    pairs: Sequence[Sequence[SideRun]] = ()  # each pair is the run of the base and the run of the candidate
    compared_steps: int | None = None  # steps of the compared runs; set only if the bits are the same
    steps: int | None = None  # steps of the complete run; set only if the bits are the same
    judgment: TrialVerdict = attrs.field(default=TrialVerdict("cannot tell yet", ""))

    def judge(self) -> TrialVerdict | None:
        """Return the verdict on the pairs, or None if the rule needs more pairs."""
        assert self.rule is not None
        for side, verdict in enumerate(("cannot tell", "worse")):
            if diverged := sum(pair[side][0] == math.inf for pair in self.pairs):
                seeds = counted(len(self.pairs), "seed")
                return TrialVerdict(verdict, f"{verdict}: the {SIDES[side]} diverged in {diverged} of {seeds}")
        return self.rule.judge([candidate - base for base, candidate in self._values(0)])

    def text(self, form: str = "simple") -> str:
        """Return the verdict, the table, the rule and notes. `form` is a table format of tabulate."""
        lines = [f"{self.judgment.text[:1].upper()}{self.judgment.text[1:]}.", ""]
        if self.rule is not None:
            columns = ("", *SIDES, "candidate against base")
            lines += [tabulate(self._rows(), columns, form, colalign=ALIGNED, disable_numparse=True), ""]
            lines.append(f"{self.rule.describe(self.number)}; {counted(len(self.pairs), 'pair')} trained.")
            error = f"an error probability of {2 * self.rule.level:.2g} for all looks together"
            lines.append(
                f"The interval of the loss has {error}; the other intervals have a confidence of {CONFIDENCE:.0%}."
            )
            if self.pairs:
                lines.append(f"All intervals are valid {assumption(len(self.pairs))}.")
        return "\n".join([*lines, *self.notes])

    def record(self) -> dict[str, Any]:
        """Return the verdict, the exit status, the losses, and intervals as [value, low, high].

        docs/trials.md explains the keys.
        """
        intervals = {
            key: list(interval.record().values()) if interval else None for key, interval in self._intervals().items()
        }
        means = np.mean(self._values(0), axis=0).tolist() if self._values(0) else [None, None]
        verdicts = (("base", None), (self.judgment.text, intervals["loss_difference"]))
        rows = zip(self.trial.revisions.values(), means, verdicts, strict=True)
        return {
            "verdict": self.judgment.verdict,
            "exit_status": VERDICTS[self.judgment.verdict],
            "text": self.judgment.text,
            **self.trial.revisions,
            "trees": self.trial.trees,
            "run": str(self.trial.run),
            "number": self.number,
            "level": None if self.rule is None else self.rule.level,
            "pairs": len(self.pairs),
            "compared_steps": self.compared_steps,
            "steps": self.steps,
            "assumption": assumption(len(self.pairs)) if self.pairs else None,
            **intervals,
            "notes": list(self.notes),
            "variants": [
                {"name": name, "mean": mean, "verdict": verdict, "difference": difference}
                for name, mean, (verdict, difference) in rows
            ],
        }

    def _values(self, number: int) -> list[tuple[float, float]]:
        """Return, for each pair, one value of the base and one of the candidate. `number` is the index in SideRun.

        A pair is skipped unless both values are known and finite.
        """
        pairs = ((base[number], candidate[number]) for base, candidate in self.pairs)
        return [
            (base, candidate) for base, candidate in pairs if base and candidate and math.isfinite(base + candidate)
        ]

    def _intervals(self) -> dict[str, Interval | None]:
        """Return the intervals of the loss difference and of the time and memory ratios. Ratios are geometric means."""
        intervals: dict[str, Interval | None] = {ROWS[0][1]: self.judgment.difference}
        for _, key, number, *_ in ROWS[1:]:
            intervals[key] = None
            if values := self._values(number):
                logarithms = np.array([math.log(candidate / base) for base, candidate in values])
                ratio = student_interval(*mean_and_error(logarithms), len(values) - 1)
                low, high = (None if bound is None else math.exp(bound) for bound in (ratio.low, ratio.high))
                intervals[key] = Interval(value=math.exp(ratio.value), low=low, high=high)
        return intervals

    def _rows(self) -> list[list[str]]:
        rows = []
        for (title, _, number, unit, digits), interval in zip(ROWS, self._intervals().values(), strict=True):
            means = np.mean(self._values(number), axis=0) / unit if self._values(number) else []
            shown = [f"{mean:.{digits}f}" for mean in means] or ["-", "-"]
            ratio = "" if interval is None or number == 0 else f"x {interval.text(RATIO_DIGITS)}"
            compared = interval.text(digits, "+") if interval is not None and number == 0 else ratio
            rows.append([title, *shown, compared])
        return rows
