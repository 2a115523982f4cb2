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


def mean_over_ranks(own_losses: Tensor, layout: Layout, data_parallel: RankGroup) -> Tensor:
    """Return the mean loss of a step from those of each rank's micro-steps, (accumulation,); stays on the device.

    All losses but idle ones are gathered in rank order and averaged in one piece: the order of additions is that of one
    rank.
    """
    losses = _gathered(own_losses, data_parallel)
    return (losses if layout.even else losses[_counted(layout, losses.device)]).mean()


def global_grad_norm(parallel: Parallel, determinism: str) -> Tensor:
    """Return the L2 norm over all gradients of the whole network; in tensor shards always the ordered one."""
    if not needs_exact_norm(determinism, sharded=parallel.shards is not None):
        return fast_grad_norm(parallel.gradients())
    if parallel.shards is not None:
        return norm_of_shards(parallel.shards, parallel.named_parameters())
    return ordered_grad_norm(parallel.gradients())


def fast_grad_norm(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm over all gradients of the whole network, a scalar on the device, in the fastest order."""
    squares = torch.stack(torch._foreach_norm([local_tensor(gradient) for gradient in gradients])).square().sum()
    shards = shards_of(gradients[0])
    if shards is not None:
        dist.all_reduce(squares, group=shards.group)
    return squares.sqrt()


def ordered_grad_norm(gradients: list[Tensor]) -> Tensor:
    """Return the same norm with the same bits for any data-parallel size and wrapper."""
    return _whole_row_sums(in_row_order(gradients)).sum().sqrt()


def _whole_row_sums(gradients: list[Tensor]) -> Tensor:
    """Return the sums of squares of all rows, in this order: gathered under FSDP, which never splits a row."""
    row_sums = row_sums_of_squares([local_tensor(gradient) for gradient in gradients])
    shards = shards_of(gradients[0])
    if shards is not None:
        places, longest = _places(tuple(gradient.shape[0] for gradient in gradients), shards.size, row_sums.device)
        row_sums = _gathered(torch.nn.functional.pad(row_sums, (0, longest - len(row_sums))), shards)[places]
    return row_sums


def norm_of_shards(shards: "TensorShards", parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """Return the norm with the same bits on any number of tensor ranks, too: the sums of shards are added in order."""
    sums = []
    for shard, own in zip(shards.exchange.own, shards.by_shard(parameters), strict=True):
        names = {id(value.grad): name for name, _, value in own}
        gradients = in_row_order([value.grad for _, _, value in own if value.grad is not None])
        rows = _whole_row_sums(gradients)
        sums.append(rows[shards.counted_rows(tuple(names[id(one)] for one in gradients), shard, rows.device)].sum())
    return shards.exchange.all_gather(torch.stack(sums)).sum().sqrt()


@cache
def _counted(layout: Layout, device: torch.device) -> Tensor:
    """Return the places of the micro-steps that are not idle, among those of all ranks."""
    idle = [idle_micro_steps(layout, rank) for rank in range(layout.data_parallel_size)]
    steps = layout.accumulation
    return torch.tensor([rank * steps + step for rank, few in enumerate(idle) for step in range(few, steps)]).to(device)


@cache
def _places(row_counts: tuple[int, ...], shards: int, device: torch.device) -> tuple[Tensor, int]:
    """Return where each row of whole parameters is among those of all shards, one after the other; the longest one.

    A shard has its rows of the first parameter, then those of the second; the first shard has the most.
    """
    rows = torch.tensor(row_counts)
    chunks = -(-rows // shards)  # as RankGroup.chunk
    held = (rows - torch.arange(shards).unsqueeze(1) * chunks).clamp(min=0).minimum(chunks)  # (shards, parameters)
    longest = int(held[0].sum())
    first = held.cumsum(1) - held + torch.arange(shards).unsqueeze(1) * longest
    parts = []
    for parameter, (count, chunk) in enumerate(zip(row_counts, chunks.tolist(), strict=True)):
        row = torch.arange(count)
        parts.append(first[row // chunk, parameter] + row % chunk)
    return torch.cat(parts).to(device), longest


def _gathered(values: Tensor, ranks: RankGroup) -> Tensor:
    """Return the 1-D values of all ranks of a group, in rank order."""
    everywhere = torch.empty(ranks.size * len(values), dtype=values.dtype, device=values.device)
    all_gather_single(everywhere, values, group=ranks.group)
    return everywhere
