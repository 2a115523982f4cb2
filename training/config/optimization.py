"""Optimization of a run: its learning-rate schedule, contradictory settings, and descriptions for the terminal."""

import json
from collections.abc import Iterator
from fractions import Fraction

import attrs

from common.errors import Problem
from training.config.key_groups import OPTIMIZERS, OptimizationOptions
from training.schedule import DECAYS, Schedule


def make_schedule(options: OptimizationOptions, steps: int) -> Schedule:
    """Return the learning-rate schedule of a run with this number of steps. Periods are rounded down to whole steps."""

    def share(percent: float) -> int:
        return int(steps * Fraction(repr(percent)) // 100)  # exact; with floats, 2.3% of 1,000 steps would be 22

    warmup_steps, decay = share(options.warmup_period_percent), options.decay
    if decay is None:
        return Schedule(peak=options.learning_rate, total_steps=steps)
    period, final = options.decay_period_percent, options.final_learning_rate_percent
    period = DECAYS[decay].period_percent if period is None else period
    return Schedule(
        peak=options.learning_rate,
        decay=decay,
        warmup_steps=warmup_steps,
        decay_steps=steps - warmup_steps if period is None else share(period),
        total_steps=steps,
        final_fraction=(DECAYS[decay].final_percent if final is None else final) / 100,
    )


def optimization_problems(options: OptimizationOptions, *, tied: bool) -> Iterator[Problem]:
    """Yield a problem for each setting that has no effect, or that contradicts another setting.

    `tied` is the value of tie_weights in model.json.
    """
    decay, period = options.decay, options.decay_period_percent
    if period is not None and decay != "warmup_stable_decay":
        yield Problem(
            key="decay_period_percent",
            found=f"{period:g}",
            expected='null, or schedule_learning_rate "warmup_stable_decay"',
            cause="every other decay begins at the end of the warm-up",
            other_keys=("schedule_learning_rate",),
        )
    if options.final_learning_rate_percent is not None and decay is None:
        yield Problem(
            key="final_learning_rate_percent",
            found=f"{options.final_learning_rate_percent:g}",
            expected="null, or a schedule_learning_rate that decays",
            cause="the learning rate is constant",
            other_keys=("schedule_learning_rate",),
        )
    if decay == "warmup_stable_decay":
        period = DECAYS[decay].period_percent if period is None else period
        assert period is not None
        if options.warmup_period_percent + period > 100:
            yield Problem(
                key="decay_period_percent",
                found=f"{period:g}",
                expected=f"at most {100 - options.warmup_period_percent:g}",
                cause=f"warmup_period_percent already takes {options.warmup_period_percent:g}%",
                other_keys=("warmup_period_percent",),
            )
    if tied and options.head_learning_rate is not None:
        yield Problem(
            key="head_learning_rate",
            found=f"{options.head_learning_rate:g}",
            expected="null, because tie_weights is true",
            cause="the output head is the token embedding",
            advice="set embedding_learning_rate instead, or set tie_weights to false",
            other_keys=("tie_weights",),
        )
    for name, field in attrs.fields_dict(OptimizationOptions).items():
        value = getattr(options, name)
        if name.startswith("muon_") and options.optimizer != "muon" and value != field.default:
            yield Problem(
                key=name,
                found=json.dumps(value),
                expected=f'{json.dumps(field.default)}, because optimizer is "{options.optimizer}"',
                advice="leave it out, or set optimizer to muon",
                other_keys=("optimizer",),
            )
    if options.muon_first_momentum is not None and options.muon_momentum_warmup_steps == 0:
        yield Problem(
            key="muon_first_momentum",
            found=f"{options.muon_first_momentum:g}",
            expected="null, or muon_momentum_warmup_steps above 0",
            cause="without a warm-up, the momentum is muon_momentum from the first step on",
            other_keys=("muon_momentum_warmup_steps",),
        )


def describe_optimizer(options: OptimizationOptions) -> str:
    """Describe the optimizer and Muon's settings. The text is part of the description of a run."""
    description = OPTIMIZERS[options.optimizer]
    if options.optimizer == "muon":
        steps = options.muon_momentum_warmup_steps
        description += "; queries, keys and values separately" if options.muon_split_qkv else ""
        description += f"; momentum {f'{options.first_momentum:g} to ' if steps else ''}{options.muon_momentum:g}"
        description += f" over {steps:,} steps" if steps else ""
    return description


def describe_group_rates(options: OptimizationOptions) -> str | None:
    """Describe the peak learning rate of each group, or return None if all groups have the same rate."""
    rates = [f"{group} {rate:g}" for group, rate in options.group_learning_rates.items()]
    return f"{', '.join(rates)}, all others {options.learning_rate:g}; all share one schedule" if rates else None


def describe_schedule(schedule: Schedule) -> str:
    """Describe the phases of a learning-rate schedule in steps. The text is part of the description of a run."""
    if schedule.decay is None:
        return f"constant learning rate {schedule.peak:g}"
    warmup = f"{schedule.warmup_steps:,} steps of warm-up to {schedule.peak:g}, "
    final = f"decay to {schedule.peak * schedule.final_fraction:g} at step {schedule.total_steps:,}"
    if schedule.decay != "warmup_stable_decay":
        return f"{warmup}{schedule.decay} {final}"
    stable_steps = schedule.total_steps - schedule.warmup_steps - schedule.decay_steps
    return f"{warmup}{stable_steps:,} at the peak, {schedule.decay_steps:,} of linear {final}"
