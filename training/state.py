"""Training state, which a checkpoint keeps, and step settings, which stay the same from step to step."""

import attrs

from common.checks import integer, number, optional
from tokens.batches.sampling import Layout
from training.guard import Guard
from training.optimizer import Optimizer
from training.parallel.wrap import Parallel
from training.precision import LossScale, Numerics
from training.schedule import Schedule


@attrs.frozen(kw_only=True)
class Position:
    """Position of a run. The step alone determines the next data, learning rate and dropout masks."""

    step: int = attrs.field(default=0, validator=integer(0))  # updates done
    tokens: int = attrs.field(default=0, validator=integer(0))  # trained on so far
    elapsed_seconds: float = attrs.field(default=0.0, validator=number(0.0))  # wall clock, earlier processes included
    validation_loss: float | None = None  # loss of these weights, if measured
    best_step: int | None = attrs.field(default=None, validator=optional(integer(0)))  # step of the best checkpoint
    best_validation_loss: float | None = None


@attrs.define(kw_only=True)
class TrainState:
    """All that a checkpoint keeps. Steps change it in place."""

    parallel: Parallel  # the network, wrapped for all ranks
    optimizer: Optimizer
    loss_scale: LossScale
    guard: Guard
    position: Position = attrs.field(factory=Position)


@attrs.frozen(kw_only=True)
class StepSettings:
    """Settings of a training step, the same for every step of a run."""

    layout: Layout
    schedule: Schedule
    numerics: Numerics
    seed: int
    clipping_max_norm: float | None
