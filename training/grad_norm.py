"""Numbers about the whole job: the loss of the global batch and the global gradient norm."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.parallel.process_group import all_gather_single
from training.parallel.wrap import local_tensor


def mean_over_ranks(values: Tensor, world_size: int) -> Tensor:
    """Return the mean over every rank's 1-D values, which are equally many; on the device: no wait for the GPU.

    All values are gathered in rank order and averaged in one piece: the order of additions is that of one rank.
    """
    everywhere = torch.empty(world_size * len(values), dtype=values.dtype, device=values.device)
    all_gather_single(everywhere, values)
    return everywhere.mean()


def fast_grad_norm(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm over all gradients of the whole network, a scalar on the device, in the fastest order."""
    squares = torch.stack(torch._foreach_norm([local_tensor(gradient) for gradient in gradients])).square().sum()
    if isinstance(gradients[0], DTensor):
        dist.all_reduce(squares)
    return squares.sqrt()


def ordered_grad_norm(gradients: list[Tensor], world_size: int) -> Tensor:
    """Return the same norm with the same bits on any world size and under any wrapper.

    A reduction's order depends on the shape it runs over, and a shard has another shape than the whole. So rows are
    summed by folding, element by element; the sums of all rows, gathered under FSDP, are then added in one piece.
    """
    own = [_row_sums(local_tensor(gradient)) for gradient in gradients]
    if isinstance(gradients[0], DTensor):
        own = _gathered(own, [gradient.shape[0] for gradient in gradients], world_size)
    return torch.cat(own).sum().sqrt()


def _row_sums(gradient: Tensor) -> Tensor:
    """Return the sum of squares of each row, (rows,); a vector's elements are its rows."""
    squares = gradient.square().flatten(1) if gradient.dim() > 1 else gradient.square().unsqueeze(1)
    while (width := squares.shape[1]) > 1:
        half = width // 2
        folded = squares[:, :half] + squares[:, half : 2 * half]
        squares = folded if width % 2 == 0 else torch.cat([folded, squares[:, -1:]], dim=1)
    return squares.squeeze(1)


def _gathered(own: list[Tensor], row_counts: list[int], world_size: int) -> list[Tensor]:
    """Return the row sums of whole parameters from each rank's, which FSDP has cut as torch.chunk does."""
    chunks = [-(-rows // world_size) for rows in row_counts]
    padded = [torch.nn.functional.pad(part, (0, chunk - len(part))) for part, chunk in zip(own, chunks, strict=True)]
    flat = torch.cat(padded)
    everywhere = torch.empty(world_size * len(flat), dtype=flat.dtype, device=flat.device)
    all_gather_single(everywhere, flat)
    by_parameter = everywhere.view(world_size, -1).split(chunks, dim=1)  # (W, chunk) each
    return [part.flatten()[:rows] for part, rows in zip(by_parameter, row_counts, strict=True)]
