"""Sums of squares of rows, in an order that depends only on a row's width: a sum has the same bits in any shard.

The order of a library's reduction depends on the shape of the whole tensor, and a shard has a different shape.
"""

from functools import cache

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 20  # number of squares that a CPU adds up at a time; these 4 MiB fit into its cache


def needs_exact_norm(determinism: str, *, sharded: bool) -> bool:
    """Return whether a run's gradient norm is added up in a fixed order of rows, as it always is with tensor shards.

    On a GPU the exact norm is a Triton kernel, so preflight also calls this to know whether a C compiler is needed.
    """
    return sharded or determinism != "off"


def row_sums_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of squares of every row of every tensor, (rows,) fp32. A vector's elements count as rows.

    The result follows the given order of tensors or, on a GPU, the order of `in_row_order`.
    """
    if tensors[0].is_cuda:
        return by_kernel(tensors)
    return torch.cat([folded_rows(tensor) for tensor in tensors])


def in_row_order(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors in the order in which `row_sums_of_squares` processes them.

    On a GPU, matrices come first, because a single kernel processes all of them.
    """
    return sorted(tensors, key=lambda tensor: tensor.dim() == 1) if tensors[0].is_cuda else tensors


def folded_rows(tensor: Tensor) -> Tensor:
    """Return the sums of squares of a tensor's rows.

    Elementwise operators add the second half of each row to its first half until one element is left.
    """
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)
    return torch.cat([_fold(block.square()) for block in rows.split(max(1, BLOCK_ELEMENTS // rows.shape[1]))])


def _fold(squares: Tensor) -> Tensor:
    """Return the sum of each row. `squares` is overwritten."""
    while (width := squares.shape[1]) > 1:
        half = width // 2
        squares[:, :half] += squares[:, half : 2 * half]
        if width % 2 == 1:  # with an odd number of columns, the last one has no partner
            squares[:, half] = squares[:, -1]
        squares = squares[:, : width - half]
    return squares.squeeze(1)


def by_kernel(tensors: list[Tensor]) -> Tensor:
    """Return each row's sum of squares, for all matrices first and then for all vectors.

    One Triton kernel processes all matrices, and reads each of them once.
    """
    from training.exactness.row_kernel import BLOCK, row_sums_kernel

    matrices = [tensor.flatten(1).contiguous() for tensor in tensors if tensor.dim() > 1]
    vectors = [tensor for tensor in tensors if tensor.dim() == 1]
    assert all(matrix.dtype == torch.float32 for matrix in matrices)  # the kernel gets only addresses, not types
    counts = tuple(len(matrix) for matrix in matrices)
    owners = _owners(counts, tensors[0].device)
    entries, first_row = [], 0
    for matrix in matrices:
        entries += [matrix.data_ptr(), first_row, matrix.shape[1]]
        first_row += len(matrix)
    # The memory is pinned, so that the host does not wait for the copy.
    table = torch.tensor(entries, dtype=torch.int64, pin_memory=owners.is_cuda).to(owners.device, non_blocking=True)
    sums = torch.empty(len(owners), device=owners.device)
    if len(owners):
        row_sums_kernel[(len(owners),)](table, owners, sums, BLOCK)
    return torch.cat([sums, torch.cat(vectors).square()]) if vectors else sums


@cache
def _owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the index of the matrix that each row belongs to, (rows,) int32."""
    return (
        torch.arange(len(counts), dtype=torch.int32)
        .repeat_interleave(torch.tensor(counts, dtype=torch.int64))
        .to(device)
    )
