"""Sums over ranks: the loss of the global batch and the global gradient norm."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.parallel import local_tensor


def mean_over_ranks(value: Tensor, world_size: int) -> Tensor:
    """Return the mean of every rank's scalar, on the device: no wait for the GPU."""
    if world_size > 1:
        dist.all_reduce(value)
    return value / world_size


def global_grad_norm(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm over all gradients of the whole network, a scalar on the device.

    Under DDP every rank holds all gradients; under FSDP each holds a shard, and squares are summed over ranks.
    """
    norms = torch._foreach_norm([local_tensor(gradient) for gradient in gradients])
    squares = torch.stack(norms).square().sum()
    if isinstance(gradients[0], DTensor):
        dist.all_reduce(squares)
    return squares.sqrt()
