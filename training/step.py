"""Training step: forward and backward pass of every micro-batch, gradient reduction, clipping, optimizer update.

Losses and norms stay on the device, and the guard blocks updates there, so that nothing here waits for the GPU. The
exception is an optimizer whose kernels cannot skip an update themselves (training/optimizer.py).
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
from training.precision import autocast, cached_casts
from training.schedule import learning_rate
from training.state import StepSettings, TrainState

NextBatch = Callable[[], MicroBatch]  # returns the next micro-batch, on the device

CLIP_EPSILON = 1e-6  # keeps the division finite, as in torch.nn.utils.clip_grad_norm_


@attrs.frozen
class StepResult:
    """Outcome of a step. Its tensors are scalars on the device."""

    learning_rate: float
    loss: Tensor  # mean nats per token over the global batch, before the update
    grad_norm: Tensor  # global L2 norm before clipping


def train_step(state: TrainState, settings: StepSettings, step: int, next_batch: NextBatch) -> StepResult:
    """Train on this rank's micro-batches of a step, and apply one update, which is the same on every rank.

    Steps are counted from 0.
    """
    rate = learning_rate(settings.schedule, step)
    local_losses = run_microbatches(state, settings, step, next_batch)
    loss = mean_over_ranks(local_losses, settings.layout, state.parallel.data_parallel)
    grad_norm = _clip(state, settings)
    # An overflow under fp16 is excused, as long as the scale is not exhausted: it blocks this update and halves the
    # scale, but does not end the run.
    excused = state.loss_scale.dynamic & ~state.loss_scale.exhausted()
    # 1.0 if this update is blocked: its loss or norm is not finite, or an earlier step has ended the run.
    update_blocked = state.guard.observe(step, local_losses, torch.stack([loss, grad_norm]), excused)
    state.loss_scale.update(grad_norm)
    state.optimizer.set_step(step, rate)
    state.optimizer.step(update_blocked)
    state.parallel.zero_grad()
    return StepResult(rate, loss, grad_norm)


def run_microbatches(state: TrainState, settings: StepSettings, step: int, next_batch: NextBatch) -> Tensor:
    """Run this rank's micro-batches of a step forward and backward, and reduce their gradients over all ranks.

    Returns the losses of the micro-batches, (accumulation,). Every rank runs the same number of micro-steps, so that
    all ranks gather FSDP's weights the same number of times; idle micro-steps add no gradient.
    """
    layout, rank, scale = settings.layout, state.parallel.data_parallel.rank, state.loss_scale.scale
    losses = []
    with cached_casts(scale.device):
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
    """Return the mean loss of a micro-batch, in nats per token.

    All micro-batches have the same size. The mean over a step's micro-batches is therefore the mean over the step's
    targets. If targets have weights, the mean weighted loss is divided by the mean weight of the step's targets.
    """
    with autocast(settings.numerics.precision, batch.inputs.device):
        if batch.weights is None:
            return state.parallel.model(batch.inputs, batch.targets)
        return state.parallel.model(batch.inputs, batch.targets, batch.weights) / batch.mean_weight


def seed_dropout(seed: int, step: int, index: int) -> None:
    """Make a micro-batch's dropout masks depend only on the seed, the step and the micro-batch's index in the step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)  # seeds the generators of the CPU and of every GPU


def _clip(state: TrainState, settings: StepSettings) -> Tensor:
    """Unscale and clip the gradients in place; return their global norm before clipping."""
    factor = 1 / (state.loss_scale.scale * settings.layout.microbatches)  # the gradients are sums over micro-batches
    grad_norm = global_grad_norm(state.parallel, settings.numerics.determinism) * factor
    if settings.clipping_max_norm is not None:
        factor = factor * (settings.clipping_max_norm / (grad_norm + CLIP_EPSILON)).clamp(max=1.0)
    torch._foreach_mul_([local_tensor(gradient) for gradient in state.parallel.gradients()], factor)
    return grad_norm
