"""One optimizer update: every micro-batch forward and backward, one gradient reduction, clip, the optimizer.

Nothing here waits for the GPU: losses and norms stay on the device, and the guard holds updates back there.
"""

import hashlib
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from tokens.batches.sampling import microbatch_index
from training.grad_norm import fast_grad_norm, mean_over_ranks, ordered_grad_norm
from training.parallel.wrap import local_tensor
from training.precision import autocast
from training.prefetch import Feed
from training.schedule import learning_rate
from training.state import Trainer

CLIP_EPSILON = 1e-6  # keeps the division finite, as in torch.nn.utils.clip_grad_norm_


@attrs.frozen
class StepResult:
    """What a step did; its tensors are scalars on the device."""

    learning_rate: float
    loss: Tensor  # mean nats per token of the global batch, before the update
    grad_norm: Tensor  # global L2 norm before clipping


def train_step(trainer: Trainer, step: int, feed: Feed) -> StepResult:
    """Take the step's micro-batches of this rank from the feed and apply one update, the same on every rank."""
    trainer.watch.step = step + 1
    rate = learning_rate(trainer.schedule, step)
    own_losses = run_microbatches(trainer, step, feed.next)
    mean_loss = mean_over_ranks(own_losses, trainer.ranks.world_size)
    trainer.optimizer.set_learning_rate(rate)
    grad_norm = _update(trainer, step, own_losses, mean_loss)
    return StepResult(rate, mean_loss, grad_norm)


def run_microbatches(trainer: Trainer, step: int, next_batch: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
    """Run this rank's micro-batches of a step forward and backward, and reduce their gradients over all ranks.

    `next_batch` yields (B, T) int64 inputs and targets. Return the loss of each, (accumulation,).
    """
    accumulation = trainer.layout.accumulation
    losses = []
    for micro_step in range(accumulation):
        inputs, targets = next_batch()
        if trainer.drop_rate > 0:
            seed_dropout(trainer.seed, step, microbatch_index(trainer.layout, micro_step, trainer.ranks.rank))
        with trainer.parallel.gradient_sync(enabled=micro_step == accumulation - 1):
            loss = microbatch_loss(trainer, inputs, targets)
            (loss * trainer.loss_scale.scale).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def microbatch_loss(trainer: Trainer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch, in nats per token."""
    with autocast(trainer.numerics.precision, trainer.ranks):
        return trainer.parallel.model(inputs, targets=targets)


def seed_dropout(seed: int, step: int, index: int) -> None:
    """Make the dropout masks of a micro-batch a function of (seed, step, its place in the step) alone."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)  # the CPU's and every GPU's generator


def _update(trainer: Trainer, step: int, own_losses: Tensor, loss: Tensor) -> Tensor:
    """Clip and apply the gradients; return their norm before clipping."""
    gradients = trainer.parallel.gradients()
    factor = 1 / (trainer.loss_scale.scale * trainer.parallel.gradient_divisor)
    if trainer.numerics.determinism == "off":
        grad_norm = fast_grad_norm(gradients) * factor
    else:
        grad_norm = ordered_grad_norm(gradients, trainer.ranks.world_size) * factor
    if trainer.clipping_max_norm is not None:
        factor = factor * (trainer.clipping_max_norm / (grad_norm + CLIP_EPSILON)).clamp(max=1.0)
    torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor)
    excused = trainer.loss_scale.dynamic & ~trainer.loss_scale.exhausted()  # fp16: the scale halves, the run goes on
    held = trainer.guard.observe(step, own_losses, torch.stack([loss, grad_norm]), excused)
    trainer.loss_scale.update(grad_norm)
    trainer.optimizer.step(held)
    trainer.parallel.zero_grad(*trainer.optimizer.parts)
    return grad_norm
