"""Training step: forward and backward of every micro-batch, one gradient reduction, clipping, optimizer update.

Losses and norms stay on the device, and the guard blocks updates there: nothing here waits for the GPU, but an
optimizer without a switch for that (training/optimizer.py).
"""

import hashlib
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from tokens.batches.micro_batches import MicroBatch
from tokens.batches.sampling import idle_micro_steps, microbatch_index
from training.grad_norm import global_grad_norm, mean_over_ranks
from training.parallel.mesh import local_tensor
from training.precision import autocast, kept_casts
from training.schedule import learning_rate
from training.state import StepSettings, TrainState

NextBatch = Callable[[], MicroBatch]  # returns one on the device

CLIP_EPSILON = 1e-6  # keeps the division finite, as in torch.nn.utils.clip_grad_norm_


@attrs.frozen
class StepResult:
    """Outcome of a step; its tensors are scalars on the device."""

    learning_rate: float
    loss: Tensor  # mean nats per token of the global batch, before the update
    grad_norm: Tensor  # global L2 norm before clipping


def train_step(state: TrainState, settings: StepSettings, step: int, next_batch: NextBatch) -> StepResult:
    """Train on this rank's micro-batches of a step, counted from 0, and apply one update, the same on every rank."""
    rate = learning_rate(settings.schedule, step)
    own_losses = run_microbatches(state, settings, step, next_batch)
    loss = mean_over_ranks(own_losses, settings.layout, state.parallel.data_parallel)
    grad_norm = _clip(state, settings)
    # An overflow under fp16 is excused: this update is blocked and the scale halves, until the scale is exhausted.
    excused = state.loss_scale.dynamic & ~state.loss_scale.exhausted()
    # 1.0 blocks this update: a loss or norm that is not finite, or any step after the one that ends the run.
    held = state.guard.observe(step, own_losses, torch.stack([loss, grad_norm]), excused)
    state.loss_scale.update(grad_norm)
    state.optimizer.set_step(step, rate)
    state.optimizer.step(held)
    state.parallel.zero_grad()
    return StepResult(rate, loss, grad_norm)


def run_microbatches(state: TrainState, settings: StepSettings, step: int, next_batch: NextBatch) -> Tensor:
    """Run this rank's micro-batches of a step forward and backward, and reduce their gradients over all ranks.

    Every rank takes as many micro-steps, so that all gather FSDP's weights as often; idle ones add no gradient.
    Returns the loss of each, (accumulation,).
    """
    layout, rank, scale = settings.layout, state.parallel.data_parallel.rank, state.loss_scale.scale
    losses = []
    with kept_casts(scale.device):
        for micro_step in range(layout.accumulation):
            batch = next_batch()
            if state.parallel.network.config.drop_rate > 0:
                seed_dropout(settings.seed, step, microbatch_index(layout, micro_step, rank))
            last, idle = micro_step == layout.accumulation - 1, micro_step < idle_micro_steps(layout, rank)
            with state.parallel.gradient_sync(enabled=last, idle=idle):
                loss = microbatch_loss(state, settings, batch)
                (loss * (torch.zeros_like(scale) if idle else scale)).backward()
            losses.append(loss.detach())
    return torch.stack(losses)


def microbatch_loss(state: TrainState, settings: StepSettings, batch: MicroBatch) -> Tensor:
    """Return the mean loss of a micro-batch, in nats per token, so that the mean over a step is that of its targets.

    With weights it is their mean weighted loss over the mean weight of the step.
    """
    with autocast(settings.numerics.precision, batch.inputs.device):
        if batch.weights is None:
            return state.parallel.model(batch.inputs, batch.targets)
        return state.parallel.model(batch.inputs, batch.targets, batch.weights) / batch.mean_weight


def seed_dropout(seed: int, step: int, index: int) -> None:
    """Make the dropout masks of a micro-batch a function of (seed, step, its place in the step) alone."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)  # the CPU's and every GPU's generator


def _clip(state: TrainState, settings: StepSettings) -> Tensor:
    """Unscale and clip the gradients in place; return their global norm before clipping."""
    factor = 1 / (state.loss_scale.scale * settings.layout.microbatches)  # of which the gradients are the sum
    grad_norm = global_grad_norm(state.parallel, settings.numerics.determinism) * factor
    if settings.clipping_max_norm is not None:
        factor = factor * (settings.clipping_max_norm / (grad_norm + CLIP_EPSILON)).clamp(max=1.0)
    torch._foreach_mul_([local_tensor(gradient) for gradient in state.parallel.gradients()], factor)
    return grad_norm
