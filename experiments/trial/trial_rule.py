"""The rule of a trial: the level, the looks at the results, and the verdict. It is fixed before the first pair of runs.

A pair is two runs with the same seed and data, one of the base and one of the candidate. The difference of a pair is
the candidate's loss minus the base's loss. Student's t separates the difference from luck, at a level that takes all
earlier trials into account. Each look at the results spends a separate share of the level. The sum of the shares bounds
the error of stopping early, however the looks are correlated.

The rule is correct if differences are roughly normal, or symmetric with heavy tails. It is wrong if differences are
skewed. A change that is better in nine runs out of ten, and much worse in the tenth, looks like a gain until the tenth
run. No rule can distinguish such a change from a real gain with only a few pairs. The verdict therefore states the
assumption, and the share of runs that the pairs may not represent. benchmarks/trial_loops.py measures the error if the
assumption is wrong.
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

# Exit status of experiment.py trial for each verdict.
VERDICTS = {
    **{"better": 0, "same bits": 10, "no difference found": 11, "worse": 12, "cannot tell": 13},
    "cannot tell yet": EXIT_STOPPED,
}
MOST_PAIRS = 1000
GAMMA = 0.389  # the sum of GAMMA / (t x max(1, log t) ** 2) over all trials t is 1
LOOKS = (0.4, 0.7, 1.0)  # the rule looks at the results after these shares of the pairs
SPENDING = 2.5  # exponent of the spending function
AIMED_POWER = 0.95  # POWER, plus the power that is lost by stopping for futility
# The trial stops for futility once it can rule out a gain of the sought size with this one-sided confidence.
FUTILITY = 0.985


def keep_level(number: int, gains: int) -> float:
    """Return the accepted probability that a trial falsely ends with "better".

    `number` is the number of the trial, counted from 1, and `gains` is the number of earlier trials that ended with
    "better".

    This is LOND (Javanmard and Montanari, arXiv 1502.06197, 2015) in the form of Zrnic, Ramdas and Jordan (JMLR 22,
    2021): ERROR x gamma x max(1, gains). The expected share of false gains among all gains is at most ERROR if the
    trials are independent or positively dependent. Until the first gain, the probability of any false gain is at most
    ERROR, however the trials depend on each other.
    """
    return ERROR * GAMMA * max(1, gains) / (number * max(1.0, math.log(number)) ** 2)


@attrs.frozen
class TrialVerdict:
    """The verdict on a candidate."""

    verdict: str  # one of VERDICTS
    text: str
    # The difference in loss, in nats per token. The interval's confidence is 1 - 2 x level.
    difference: Interval | None = None


@attrs.frozen(kw_only=True)
class TrialRule:
    """The level and the looks of a trial."""

    level: float  # probability of a false "better", and also of a false "worse"
    looks: tuple[int, ...]  # numbers of pairs after which the rule looks at the differences, ascending

    @classmethod
    def of(cls, level: float, pairs: int | None) -> "TrialRule":
        """Return a rule with a single look after `pairs` pairs.

        If `pairs` is None, the rule has three looks. The last look comes after enough pairs to find a difference of
        SOUGHT_DEVIATIONS.
        """
        if pairs is not None:
            return cls(level=level, looks=(pairs,))
        last = (1 - LOOKS[-2] ** SPENDING) * level
        enough = next(n for n in range(3, MOST_PAIRS) if _power(_scaled(SOUGHT_DEVIATIONS), last, n) >= AIMED_POWER)
        looks = {max(3, math.ceil(share * enough)) for share in LOOKS}
        return cls(level=level, looks=tuple(sorted(looks)))

    def describe(self, number: int) -> str:
        """Return a sentence with the number, the level and the looks of a trial."""
        looks = " and ".join(", ".join(map(str, self.looks)).rsplit(", ", 1))
        return f"Trial {number:,}: a false gain has a probability of {self.level:.2g}; looks after {looks} pairs"

    def spent(self, pairs: int) -> float:
        """Return the part of the trial's level that the look after `pairs` pairs spends.

        The spending function is a power of the share of pairs (Kim and DeMets, Biometrika 74, 1987).
        """
        previous_look = max((look for look in self.looks if look < pairs), default=0)
        share, last = (float(number) ** SPENDING for number in (pairs, self.looks[-1]))
        return self.level * (share - previous_look**SPENDING) / last

    def judge(self, differences: Sequence[float]) -> TrialVerdict | None:
        """Return the verdict at a look, or None if the trial must continue to the next look."""
        pairs, level = len(differences), self.spent(len(differences))
        mean, error = mean_and_error(np.array(differences))
        if error is None or np.ptp(differences) == 0:
            if not any(differences):
                return TrialVerdict("no difference found", "no difference found: all pairs have equal losses")
            why = "all pairs have the same difference"
            if pairs == 1:
                why = "one pair cannot separate a difference from luck"
            text = f"cannot tell: {why}; the mean difference is {mean:+.{LOSS_DIGITS}f}"
            return TrialVerdict("cannot tell", text)
        deviation, freedom = error * math.sqrt(pairs), pairs - 1
        difference = student_interval(mean, error, freedom, 1 - 2 * level)
        if difference.excludes_zero:
            verdict, gain = ("better", -difference) if mean < 0 else ("worse", difference)
            return TrialVerdict(verdict, f"{verdict} by {gain.text(LOSS_DIGITS)}, {assumption(pairs)}", difference)
        sought = _scaled(SOUGHT_DEVIATIONS) * deviation
        if pairs < self.looks[-1] and abs(mean) + student_quantile(FUTILITY, freedom) * error >= sought:
            return None
        detectable_difference = detectable(level, pairs) * deviation
        text = (
            f"no difference found: {difference.text(LOSS_DIGITS, '+')}; a difference of "
            f"{detectable_difference:.{LOSS_DIGITS}f} would have been found with a probability of {POWER:.0%}"
        )
        return TrialVerdict("no difference found", text, difference)


def assumption(pairs: int) -> str:
    """Return a phrase with the assumption behind a verdict, and a limit for rare events that the pairs may have missed.

    If something happens in a share p of all runs, the probability that n pairs never show it is (1 - p) ** n, whatever
    the distribution. The phrase contains the largest share p for which this probability is at least ERROR.
    """
    unseen = 1 - ERROR ** (1 / pairs)
    return (
        f"if differences are roughly normal; {pairs} pairs may have missed events that occur in up to {unseen:.0%} of "
        "runs"
    )


@cache
def detectable(level: float, pairs: int) -> float:
    """Return how large a difference must be to be found with probability POWER.

    The unit is the standard deviation of a pair's difference.
    """
    return detectable_shift(lambda shift: _power(shift, level, pairs))


def seeds_of(name: str) -> range:
    """Return the seeds of a trial, which are the same in every call.

    Different trials have different seeds, so that earlier decisions cannot have benefited from the luck of these seeds.
    """
    first = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    return range(first, first + MOST_PAIRS)


def _scaled(deviations: float) -> float:
    """Convert from standard deviations of a run's loss over seeds to standard deviations of a pair's difference."""
    return deviations / math.sqrt(2)


@cache
def _power(shift: float, level: float, pairs: int) -> float:
    """Return the probability that a true difference of `shift` is found, from a noncentral t distribution.

    The unit of `shift` is the standard deviation of a single pair's difference.
    """
    critical = student_quantile(1 - level, pairs - 1)
    return 1 - float(special.nctdtr(pairs - 1, shift * math.sqrt(pairs), critical))
