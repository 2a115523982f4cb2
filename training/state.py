"""Training state: what a step works on, and what a checkpoint sees of it."""

import attrs

from tokens.batches.sampling import Layout
from training.optimizer import Optimizer
from training.parallel.process_group import Ranks
from training.parallel.wrap import Parallel
from training.precision import LossScale, Numerics
from training.schedule import Schedule
from training.spike_guard import Guard
from training.supervision.heartbeat import Watch


@attrs.define(kw_only=True)
class Trainer:
    """What a step works on."""

    ranks: Ranks
    parallel: Parallel
    optimizer: Optimizer
    layout: Layout
    schedule: Schedule
    numerics: Numerics
    loss_scale: LossScale
    guard: Guard
    watch: Watch
    drop_rate: float
    seed: int
    clipping_max_norm: float | None


@attrs.frozen(kw_only=True)
class RunState:
    """What a run is besides its weights and moments. The step says which data, learning rate and dropout come next."""

    step: int = 0  # updates done
    tokens: int = 0  # trained on so far
    elapsed_seconds: float = 0.0  # wall clock, earlier processes included
    validation_loss: float | None = None  # of these weights
    best_step: int | None = None  # of the checkpoints
    best_validation_loss: float | None = None
