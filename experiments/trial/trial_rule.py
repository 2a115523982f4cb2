"""Rule of a trial, stated before its first pair of runs: level, looks, and the verdict on the pairs' differences.

A difference is candidate - base, of two runs that share seed and data. Student's t tells it from luck, at a level
that counts all earlier trials; each look spends its own share of the level, so that the sum bounds the error of
stopping early, whatever the looks have in common.

This holds if differences are about normal, or symmetric with heavy tails. It does not hold if they are skewed. A change
that is better in nine runs of ten, and much worse in the tenth, looks like a gain until the tenth run comes. No rule
can tell the two apart from a few pairs, so the verdict names the assumption, with the share of runs that the pairs may
not have shown. benchmarks/trial_loops.py measures the error without it.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import cache

import attrs
import numpy as np
from scipy import special

from common.errors import EXIT_STOPPED
from evaluation.shared.significance import (
    ERROR,
    POWER,
    SOUGHT_DEVIATIONS,
    Interval,
    detectable_shift,
    mean_and_error,
    student_interval,
    student_quantile,
)
from experiments.shared.experiment_files import LOSS_DIGITS

# Exit status of experiment.py trial
VERDICTS = {
    **{"better": 0, "same bits": 10, "no difference found": 11, "worse": 12, "cannot tell": 13},
    "cannot tell yet": EXIT_STOPPED,
}
MOST_PAIRS = 1000
GAMMA = 0.389  # 1 / (t x max(1, log t) ** 2) times this sums to 1
LOOKS = (0.4, 0.7, 1.0)  # shares of the pairs
SPENDING = 2.5  # exponent
AIMED_POWER = 0.95  # POWER, and what the stops for futility lose
FUTILITY = 0.985  # one-sided confidence that a gain worth seeking is not there


def keep_level(number: int, kept: int) -> float:
    """Return the probability of a false "better" that trial `number` (1: the first) may have, after `kept` gains.

    LOND (Javanmard and Montanari, arXiv 1502.06197, 2015) as Zrnic, Ramdas and Jordan have it (JMLR 22, 2021): ERROR x
    gamma x max(1, kept). Of all that is kept, at most the share ERROR is false, in expectation, where trials are
    independent or positively dependent. Until a first change is kept, the probability of any false one is at most
    ERROR, under any dependence.
    """
    return ERROR * GAMMA * max(1, kept) / (number * max(1.0, math.log(number)) ** 2)


@attrs.frozen
class TrialVerdict:
    """The verdict on a candidate."""

    verdict: str  # of VERDICTS
    text: str
    difference: Interval | None = None  # of the loss, nats per token; confidence: 1 - 2 x level


@attrs.frozen(kw_only=True)
class TrialRule:
    """Level and looks of a trial."""

    level: float  # probability of a false "better", and of a false "worse"
    looks: tuple[int, ...]  # pairs after which the differences are looked at, rising

    @classmethod
    def of(cls, level: float, pairs: int | None) -> "TrialRule":
        """Return one look after so many pairs; None: three looks, the last one after enough for SOUGHT_DEVIATIONS."""
        if pairs is not None:
            return cls(level=level, looks=(pairs,))
        last = (1 - LOOKS[-2] ** SPENDING) * level
        enough = next(n for n in range(3, MOST_PAIRS) if _power(_scaled(SOUGHT_DEVIATIONS), last, n) >= AIMED_POWER)
        looks = {max(3, math.ceil(share * enough)) for share in LOOKS}
        return cls(level=level, looks=tuple(sorted(looks)))

    def describe(self, number: int) -> str:
        """Return number, level and looks of a trial as text."""
        looks = " and ".join(", ".join(map(str, self.looks)).rsplit(", ", 1))
        return f"Trial {number:,}: a false gain has a probability of {self.level:.2g}; looks after {looks} pairs"

    def spent(self, pairs: int) -> float:
        """Return the level of one look, by a power of the share of pairs (Kim and DeMets, Biometrika 74, 1987)."""
        before = max((look for look in self.looks if look < pairs), default=0)
        share, last = (float(number) ** SPENDING for number in (pairs, self.looks[-1]))
        return self.level * (share - before**SPENDING) / last

    def judge(self, differences: Sequence[float]) -> TrialVerdict | None:
        """Return the verdict at a look; None: the next look's pairs are to be trained."""
        pairs, level = len(differences), self.spent(len(differences))
        mean, error = mean_and_error(np.array(differences))
        if error is None or np.ptp(differences) == 0:
            if not any(differences):
                return TrialVerdict("no difference found", "no difference found: all pairs have equal losses")
            why = "one pair tells no difference from luck" if pairs == 1 else "the seeds change no loss"
            text = f"cannot tell: {why}; the difference is {differences[0]:+.{LOSS_DIGITS}f}"
            return TrialVerdict("cannot tell", text)
        deviation, freedom = error * math.sqrt(pairs), pairs - 1
        difference = student_interval(mean, error, freedom, 1 - 2 * level)
        if difference.excludes_zero:
            verdict, gain = ("better", -difference) if mean < 0 else ("worse", difference)
            return TrialVerdict(verdict, f"{verdict} by {gain.text(LOSS_DIGITS)}, {assumption(pairs)}", difference)
        sought = _scaled(SOUGHT_DEVIATIONS) * deviation
        if pairs < self.looks[-1] and abs(mean) + student_quantile(FUTILITY, freedom) * error >= sought:
            return None
        found = detectable(level, pairs) * deviation
        text = (
            f"no difference found: {difference.text(LOSS_DIGITS, '+')}; one of {found:.{LOSS_DIGITS}f} would have been "
            f"found with a probability of {POWER:.0%}"
        )
        return TrialVerdict("no difference found", text, difference)


def assumption(pairs: int) -> str:
    """Return what a verdict on a difference needs, and what this many pairs cannot rule out, as text.

    An outcome of a share p of all runs is in none of n pairs with the probability (1 - p) ** n, whatever the
    distribution is. The share in the text is the largest one that ERROR does not exclude.
    """
    unseen = 1 - ERROR ** (1 / pairs)
    return (
        f"if differences are about normal: what happens in up to {unseen:.0%} of runs may be missing in {pairs} pairs"
    )


@cache
def detectable(level: float, pairs: int) -> float:
    """Return the difference found with the probability POWER, in deviations of a pair's difference."""
    return detectable_shift(lambda shift: _power(shift, level, pairs))


def seeds_of(name: str) -> range:
    """Return a trial's seeds: its own, so that no earlier trial has chosen by their luck; the same at each call."""
    first = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    return range(first, first + MOST_PAIRS)


def _scaled(deviations: float) -> float:
    """Return deviations of one run over seeds in those of a pair's difference, of two runs."""
    return deviations / math.sqrt(2)


@cache
def _power(shift: float, level: float, pairs: int) -> float:
    """Return the probability to find a difference of `shift` deviations of a pair's (noncentral t)."""
    critical = student_quantile(1 - level, pairs - 1)
    return 1 - float(special.nctdtr(pairs - 1, shift * math.sqrt(pairs), critical))
