"""Global gradient norm, fast or bit-exact, and the mean loss of the global batch."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokens.batches.sampling import Layout, idle_micro_steps
from training.exactness.row_sums import in_row_order, needs_exact_norm, row_sums_of_squares
from training.parallel.mesh import local_tensor, shards_of
from training.parallel.process_group import RankGroup, all_gather_single
from training.parallel.wrap import Parallel

if TYPE_CHECKING:
    from training.parallel.tensor_shards import TensorShards


def mean_over_ranks(local_losses: Tensor, layout: Layout, data_parallel: RankGroup) -> Tensor:
    """Return the mean loss of a step over all ranks, on the device.

    `local_losses`, (accumulation,), are the losses of this rank's micro-steps. The losses of all ranks, except those of
    idle micro-steps, are gathered in rank order and averaged in one operation. They are therefore added in the same
    order as on a single rank.
    """
    losses = _gather(local_losses, data_parallel)
    return (losses if layout.even else losses[_active_positions(layout, losses.device)]).mean()


def global_grad_norm(parallel: Parallel, determinism: str) -> Tensor:
    """Return the L2 norm of all gradients of the network. With tensor shards, the additions have a fixed order."""
    if not needs_exact_norm(determinism, sharded=parallel.shards is not None):
        return fast_grad_norm(parallel.gradients())
    if parallel.shards is not None:
        return norm_of_shards(parallel.shards, parallel.named_parameters())
    return ordered_grad_norm(parallel.gradients())


def fast_grad_norm(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients of the network, a scalar on the device.

    The squares are added in whatever order is fastest.
    """
    squares = torch.stack(torch._foreach_norm([local_tensor(gradient) for gradient in gradients])).square().sum()
    shards = shards_of(gradients[0])
    if shards is not None:
        dist.all_reduce(squares, group=shards.group)
    return squares.sqrt()


def ordered_grad_norm(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients. Its bits are the same for any data-parallel size and wrapper."""
    return _all_row_sums(in_row_order(gradients)).sum().sqrt()


def _all_row_sums(gradients: list[Tensor]) -> Tensor:
    """Return each row's sum of squares for the full gradients, in the order of gradients and rows.

    Under FSDP, which never splits a row, the sums are gathered from all shards.
    """
    row_sums = row_sums_of_squares([local_tensor(gradient) for gradient in gradients])
    shards = shards_of(gradients[0])
    if shards is not None:
        row_counts = tuple(gradient.shape[0] for gradient in gradients)
        positions, shard_length = _row_positions(row_counts, shards.size, row_sums.device)
        row_sums = _gather(torch.nn.functional.pad(row_sums, (0, shard_length - len(row_sums))), shards)[positions]
    return row_sums


def norm_of_shards(shards: "TensorShards", parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """Return the L2 norm of all gradients. Its bits are the same on any number of data-parallel and tensor ranks.

    The sums of the tensor shards are added in the order of the shards.
    """
    sums = []
    for shard, shard_parameters in zip(shards.exchange.local_shards, shards.by_shard(parameters), strict=True):
        names = {id(parameter.grad): name for name, _, parameter in shard_parameters}
        gradients = in_row_order([parameter.grad for *_, parameter in shard_parameters if parameter.grad is not None])
        rows = _all_row_sums(gradients)
        gradient_names = tuple(names[id(gradient)] for gradient in gradients)
        sums.append(rows[shards.counted_rows(gradient_names, shard, rows.device)].sum())
    return shards.exchange.all_gather(torch.stack(sums)).sum().sqrt()


@cache
def _active_positions(layout: Layout, device: torch.device) -> Tensor:
    """Return the positions of the micro-steps that are not idle, in the list gathered from all ranks."""
    idle_counts = [idle_micro_steps(layout, rank) for rank in range(layout.data_parallel_size)]
    steps = layout.accumulation
    positions = [rank * steps + step for rank, idle in enumerate(idle_counts) for step in range(idle, steps)]
    return torch.tensor(positions).to(device)


@cache
def _row_positions(row_counts: tuple[int, ...], shards: int, device: torch.device) -> tuple[Tensor, int]:
    """Return where each row of the full parameters is in the concatenated shards, and the length of a shard.

    A shard holds its rows of the first parameter, then its rows of the second parameter, and so on. The first shard has
    the most rows; the other shards are padded to its length.
    """
    rows = torch.tensor(row_counts)
    chunks = -(-rows // shards)  # as RankGroup.chunk computes it
    # Rows of each parameter in each shard, (shards, parameters)
    shard_rows = (rows - torch.arange(shards).unsqueeze(1) * chunks).clamp(min=0).minimum(chunks)
    shard_length = int(shard_rows[0].sum())
    first = shard_rows.cumsum(1) - shard_rows + torch.arange(shards).unsqueeze(1) * shard_length
    parts = []
    for parameter, (count, chunk) in enumerate(zip(row_counts, chunks.tolist(), strict=True)):
        row = torch.arange(count)
        parts.append(first[row // chunk, parameter] + row % chunk)
    return torch.cat(parts).to(device), shard_length


def _gather(local_values: Tensor, ranks: RankGroup) -> Tensor:
    """Concatenate the 1-D tensors of all ranks in a group, in rank order."""
    all_values = torch.empty(ranks.size * len(local_values), dtype=local_values.dtype, device=local_values.device)
    all_gather_single(all_values, local_values, group=ranks.group)
    return all_values
