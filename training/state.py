"""The training state, which a checkpoint stores, and the step settings, which are the same for every step."""

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

    step: int = attrs.field(default=0, validator=integer(0))  # number of updates so far
    tokens: int = attrs.field(default=0, validator=integer(0))  # tokens trained on so far
    elapsed_seconds: float = attrs.field(default=0.0, validator=number(0.0))  # wall-clock time of all jobs so far
    validation_loss: float | None = None  # loss of these weights, if it was measured
    best_step: int | None = attrs.field(default=None, validator=optional(integer(0)))  # step of the best checkpoint
    best_validation_loss: float | None = None


@attrs.define(kw_only=True)
class TrainState:
    """Everything that a checkpoint stores. Steps change it in place."""

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
