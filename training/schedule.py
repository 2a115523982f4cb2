"""Learning-rate schedule: linear warm-up, then cosine decay to a tenth of the peak; or constant."""

import math

import attrs

FINAL_FRACTION = 0.1  # share of the peak, reached at the last step


@attrs.frozen(kw_only=True)
class Schedule:
    peak: float
    warmup_steps: int
    total_steps: int  # warm-up included
    constant: bool


def learning_rate(schedule: Schedule, step: int) -> float:
    """Return the learning rate of a step, 0 <= step < total_steps."""
    if schedule.constant:
        return schedule.peak
    if step < schedule.warmup_steps:
        return schedule.peak * (step + 1) / schedule.warmup_steps
    progress = (step - schedule.warmup_steps + 1) / max(1, schedule.total_steps - schedule.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return schedule.peak * (FINAL_FRACTION + (1 - FINAL_FRACTION) * cosine)
