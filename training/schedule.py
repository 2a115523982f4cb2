"""Learning-rate schedule: a linear warm-up to the peak, then a decay over the last steps; or a constant rate."""

import math
from collections.abc import Callable

import attrs


@attrs.frozen(kw_only=True)
class Decay:
    """A decay from the peak to a final learning rate, with its defaults."""

    curve: Callable[[float], float]  # falls from 1 to 0 while its argument, the decay's progress, rises from 0 to 1
    period_percent: float | None  # percentage of all steps; None: all steps after the warm-up
    final_percent: float  # percentage of the peak, reached at the last step


DECAYS = {
    "cosine": Decay(
        curve=lambda progress: 0.5 * (1 + math.cos(math.pi * progress)), period_percent=None, final_percent=10.0
    ),
    "linear": Decay(curve=lambda progress: 1 - progress, period_percent=None, final_percent=0.0),
    "warmup_stable_decay": Decay(curve=lambda progress: 1 - progress, period_percent=20.0, final_percent=0.0),
}


@attrs.frozen(kw_only=True)
class Schedule:
    peak: float
    decay: str | None = None  # one of DECAYS; None: the peak at every step
    warmup_steps: int = 0
    decay_steps: int = 0  # at the end of the run; between warm-up and decay, the rate is the peak
    total_steps: int  # including warm-up and decay
    final_fraction: float = 1.0  # fraction of the peak, reached at the last step


def agree(old: Schedule, new: Schedule, steps: int) -> bool:
    """Return whether two schedules have the same learning rates in the first `steps` steps of a run."""
    if old == new or steps > min(old.total_steps, new.total_steps):
        return old == new
    return all(learning_rate(old, step) == learning_rate(new, step) for step in range(steps))


def learning_rate(schedule: Schedule, step: int) -> float:
    """Return the learning rate of a step; 0 <= step < total_steps."""
    if schedule.decay is None:
        return schedule.peak
    if step < schedule.warmup_steps:
        return schedule.peak * (step + 1) / schedule.warmup_steps
    decayed_steps = step + 1 - (schedule.total_steps - schedule.decay_steps)
    if decayed_steps <= 0:
        return schedule.peak
    share = DECAYS[schedule.decay].curve(decayed_steps / schedule.decay_steps)
    return schedule.peak * (schedule.final_fraction + (1 - schedule.final_fraction) * share)
