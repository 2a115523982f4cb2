"""Table of a trial: loss, time and memory of both commits, printed, as Markdown and as JSON."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from tabulate import tabulate

from evaluation.shared.significance import CONFIDENCE, Interval, mean_and_error, student_interval
from experiments.shared.experiment_files import counted, write_results
from experiments.trial.trial import SIDES, Trial
from experiments.trial.trial_rule import LOSS_DIGITS, VERDICTS, Judgement, TrialRule

NO_VERDICT = Judgement(verdict="cannot tell", text="cannot tell yet")


@attrs.frozen(kw_only=True)
class SideRun:
    """Results of one run of a pair."""

    loss: float | None  # final validation loss, nats per token; infinite: diverged
    step_seconds: float | None  # median over the logged steps
    memory_bytes: float | None  # peak


@attrs.frozen(kw_only=True)
class TrialTable:
    """A trial, the pairs trained so far, and the verdict."""

    trial: Trial
    notes: Sequence[str]
    number: int = 0  # among the project's; 0: no pair is needed
    rule: TrialRule | None = None
    pairs: Sequence[Sequence[SideRun]] = ()  # base and candidate
    judgement: Judgement = NO_VERDICT

    def judge(self) -> Judgement | None:
        """Return the verdict on the pairs at a look; None: the rule wants more of them."""
        assert self.rule is not None
        for verdict, side, name in zip(("cannot tell", "worse"), range(2), SIDES, strict=True):
            if lost := sum(math.isinf(pair[side].loss or 0) for pair in self.pairs):
                text = f"{verdict}: the {name} diverged in {lost} of {counted(len(self.pairs), 'seed')}"
                return Judgement(verdict=verdict, text=text)
        return self.rule.judge([candidate - base for base, candidate in self._values("loss")])

    def text(self, form: str = "simple") -> str:
        """Return the table, the rule and notes; `form`: of tabulate."""
        lines = [f"{self.judgement.text[:1].upper()}{self.judgement.text[1:]}.", ""]
        if self.rule is not None:
            columns = ("", *SIDES, "candidate against base")
            lines += [tabulate(self._rows(), columns, form, colalign=("left", "right", "right", "left")), ""]
            rule = describe_rule(self.number, self.rule)
            lines.append(f"{rule[:1].upper()}{rule[1:]}; {counted(len(self.pairs), 'pair')} trained.")
            sure = 1 - 2 * self.rule.level
            lines.append(f"Intervals: {sure:.2%} of the loss, all looks together; {CONFIDENCE:.0%} of time and memory.")
        return "\n".join([*lines, *self.notes])

    def write(self, output: Path) -> str:
        """Write trial.md and trial.json; return a line about it."""
        base, candidate = self.trial.revisions.values()
        markdown = f"# Trial of {candidate} against {base} on {self.trial.run}\n\n{self.text('github')}"
        return f"{write_results(output, 'trial', markdown, self.record())}: this table"

    def record(self) -> dict[str, Any]:
        """Return verdict, exit status, losses, and intervals [value, low, high]: docs/agents.md has the keys."""
        intervals = [_tuple(interval) for interval in self._intervals()]
        means = np.mean(self._values("loss") or [(math.nan, math.nan)], axis=0).tolist()
        names, verdicts = self.trial.revisions.values(), ("base", self.judgement.text)
        rows = zip(names, means, verdicts, (None, intervals[0]), strict=True)
        return {
            "verdict": self.judgement.verdict,
            "exit_status": VERDICTS[self.judgement.verdict],
            "text": self.judgement.text,
            **self.trial.revisions,
            "trees": self.trial.trees,
            "run": str(self.trial.run),
            "number": self.number,
            "level": None if self.rule is None else self.rule.level,
            "pairs": len(self.pairs),
            **dict(zip(("loss_difference", "step_time_ratio", "memory_ratio"), intervals, strict=True)),
            "notes": list(self.notes),
            "variants": [
                {"name": name, "mean": None if math.isnan(mean) else mean, "verdict": verdict, "difference": difference}
                for name, mean, verdict, difference in rows
            ],
        }

    def _values(self, name: str) -> list[tuple[float, float]]:
        """Return a value of base and candidate in each pair where both are known and finite."""
        both = ((getattr(base, name), getattr(candidate, name)) for base, candidate in self.pairs)
        return [(base, candidate) for base, candidate in both if base and candidate and math.isfinite(base + candidate)]

    def _intervals(self) -> tuple[Interval | None, Interval | None, Interval | None]:
        """Return the loss's difference, and geometric means of the ratios of time and memory."""
        ratios = []
        for name in ("step_seconds", "memory_bytes"):
            logarithms = np.array([math.log(candidate / base) for base, candidate in self._values(name)])
            ratio = None
            if len(logarithms):
                found = student_interval(*mean_and_error(logarithms), len(logarithms) - 1)
                low, high = (None if bound is None else math.exp(bound) for bound in (found.low, found.high))
                ratio = Interval(value=math.exp(found.value), low=low, high=high)
            ratios.append(ratio)
        return self.judgement.difference, ratios[0], ratios[1]

    def _rows(self) -> list[list[str]]:
        difference, time, memory = self._intervals()
        return [
            self._row(
                "validation loss",
                "loss",
                1,
                LOSS_DIGITS,
                "" if difference is None else difference.text(LOSS_DIGITS, "+"),
            ),
            self._row("ms per step", "step_seconds", 1e-3, 1, "" if time is None else f"x {time.text(3)}"),
            self._row("peak memory, MB", "memory_bytes", 1e6, 1, "" if memory is None else f"x {memory.text(3)}"),
        ]

    def _row(self, title: str, name: str, unit: float, digits: int, compared: str) -> list[str]:
        means = np.mean(self._values(name), axis=0) if self._values(name) else []
        return [title, *([f"{mean / unit:.{digits}f}" for mean in means] or ["-", "-"]), compared]


def describe_rule(number: int, rule: TrialRule) -> str:
    """Return number, level and looks of a trial as text."""
    *early, last = map(str, rule.looks)
    looks = f"{', '.join(early)} and {last}" if early else last
    return f"trial {number:,}: a false gain has a probability of {rule.level:.2g}; looks after {looks} pairs"


def _tuple(interval: Interval | None) -> list[float | None] | None:
    return None if interval is None else list(attrs.astuple(interval))
