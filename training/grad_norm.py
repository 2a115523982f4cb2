"""Global gradient norm, fast or bit-exact, and the mean loss of the global batch."""

import torch
import torch.distributed as dist
from torch import Tensor

from training.parallel.mesh import RankGroup
from training.parallel.process_group import all_gather_single
from training.parallel.sharding import local_tensor, shards_of


def mean_over_ranks(values: Tensor, data_parallel: RankGroup) -> Tensor:
    """Return the mean over every rank's 1-D values, which are equally many; stays on the device.

    All values are gathered in rank order and averaged in one piece: the order of additions is that of one rank.
    """
    return _gathered(values, data_parallel).mean()


def fast_grad_norm(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm over all gradients of the whole network, a scalar on the device, in the fastest order."""
    squares = torch.stack(torch._foreach_norm([local_tensor(gradient) for gradient in gradients])).square().sum()
    shards = shards_of(gradients[0])
    if shards is not None:
        dist.all_reduce(squares, group=shards.group)
    return squares.sqrt()


def ordered_grad_norm(gradients: list[Tensor]) -> Tensor:
    """Return the same norm with the same bits for any data-parallel size and wrapper.

    A reduction's order depends on the shape it runs over, and a shard has another shape than the whole. So rows are
    summed by folding, element by element; the sums of all rows, gathered under FSDP, are then added in one piece.
    """
    row_sums = [_row_sums(local_tensor(gradient)) for gradient in gradients]
    shards = shards_of(gradients[0])
    if shards is not None:
        row_sums = _whole(row_sums, [gradient.shape[0] for gradient in gradients], shards)
    return torch.cat(row_sums).sum().sqrt()


def _row_sums(gradient: Tensor) -> Tensor:
    """Return the sum of squares of each row, (rows,); a vector's elements are its rows."""
    squares = gradient.square().flatten(1) if gradient.dim() > 1 else gradient.square().unsqueeze(1)
    while (width := squares.shape[1]) > 1:
        half = width // 2
        folded = squares[:, :half] + squares[:, half : 2 * half]
        squares = folded if width % 2 == 0 else torch.cat([folded, squares[:, -1:]], dim=1)
    return squares.squeeze(1)


def _whole(own: list[Tensor], row_counts: list[int], shards: RankGroup) -> list[Tensor]:
    """Return the row sums of whole parameters from those of each shard."""
    chunks = [shards.chunk(rows) for rows in row_counts]
    padded = [torch.nn.functional.pad(part, (0, chunk - len(part))) for part, chunk in zip(own, chunks, strict=True)]
    by_parameter = _gathered(torch.cat(padded), shards).view(shards.size, -1).split(chunks, dim=1)  # (S, chunk) each
    return [part.flatten()[:rows] for part, rows in zip(by_parameter, row_counts, strict=True)]


def _gathered(values: Tensor, ranks: RankGroup) -> Tensor:
    """Return the 1-D values of all ranks of a group, in rank order."""
    everywhere = torch.empty(ranks.size * len(values), dtype=values.dtype, device=values.device)
    all_gather_single(everywhere, values, group=ranks.group)
    return everywhere
