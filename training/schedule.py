"""Learning-rate schedule: linear warm-up to the peak, then a decay over the last steps; or constant."""

import math
from collections.abc import Callable

import attrs


@attrs.frozen(kw_only=True)
class Decay:
    """A decay from the peak to a final learning rate, with its defaults."""

    curve: Callable[[float], float]  # from 1 to 0 while its argument, the progress of the decay, goes from 0 to 1
    period_percent: float | None  # of all steps; None: all steps after warm-up
    final_percent: float  # of the peak, reached at the last step


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
    decay_steps: int = 0  # the last ones; between warm-up and decay the rate is the peak
    total_steps: int  # warm-up and decay included
    final_fraction: float = 1.0  # of the peak, reached at the last step


def agree(one: Schedule, other: Schedule, steps: int) -> bool:
    """Tell whether two schedules have the same learning rates in the first steps of a run."""
    if one == other or steps > min(one.total_steps, other.total_steps):
        return one == other
    return all(learning_rate(one, step) == learning_rate(other, step) for step in range(steps))


def learning_rate(schedule: Schedule, step: int) -> float:
    """Return the learning rate of a step, 0 <= step < total_steps."""
    if schedule.decay is None:
        return schedule.peak
    if step < schedule.warmup_steps:
        return schedule.peak * (step + 1) / schedule.warmup_steps
    decayed_steps = step + 1 - (schedule.total_steps - schedule.decay_steps)
    if decayed_steps <= 0:
        return schedule.peak
    share = DECAYS[schedule.decay].curve(decayed_steps / schedule.decay_steps)
    return schedule.peak * (schedule.final_fraction + (1 - schedule.final_fraction) * share)
