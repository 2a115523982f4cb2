"""Spot machines: expected time of a run that is preempted, and the checkpoint interval that keeps it shortest.

J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006); J. W. Young, A
first order approximation to the optimum checkpoint interval, CACM 17 (1974). Simulated: benchmarks/preempted_runs.py.
"""

import math

import attrs

# 202 preemptions in the 431 hours that one V100 ran in four zones of AWS, 22 to 29 April 2023:
# github.com/skypilot-org/spot-traces, preemption/1-node/aws-04-22-2023 (NSDI 24, Can't Be Late).
PREEMPTIONS_PER_HOUR = 0.47


@attrs.frozen(kw_only=True)
class Preemptions:
    """Preemptions of a machine, at random moments and without notice."""

    per_hour: float
    checkpoint_seconds: float  # that training is taken to stand still for a checkpoint
    segments: float  # of the run, each of which ends in a checkpoint

    def seconds(self, start_up: float, work: float) -> float:
        """Return the expected paid time of a run, of so many seconds without preemptions; infinite beyond reason.

        A segment begins anew with each preemption, after another start-up, which may be preempted as well.
        """
        rate, segment = self.per_hour / 3600, work / self.segments + self.checkpoint_seconds
        try:
            return (
                math.expm1(rate * start_up) + self.segments * math.exp(rate * start_up) * math.expm1(rate * segment)
            ) / rate
        except OverflowError:
            return math.inf

    def best_interval_seconds(self, validation_seconds: float = 0.0) -> float:
        """Return Young's interval between checkpoints, each with a validation, in seconds of training."""
        return math.sqrt(2 * (self.checkpoint_seconds + validation_seconds) * 3600 / self.per_hour)
