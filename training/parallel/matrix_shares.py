"""Matrices shared out among ranks: each is computed by one rank, whole, and the results go to all of them.

So a matrix has the same bits on any number of ranks and under any wrapper: it is one computation of one shape.
"""

from collections.abc import Callable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from training.parallel.process_group import RankGroup, all_gather_single


@attrs.frozen(kw_only=True)
class Matrix:
    """A matrix in consecutive rows of a parameter."""

    parameter: str  # its name
    parameter_rows: int  # whole, on all ranks together
    first_row: int
    rows: int
    columns: int

    def rows_on(self, rank: int, ranks: RankGroup) -> range:
        """Return the rows of the parameter that are this matrix's and lie in a rank's shard."""
        shard = attrs.evolve(ranks, rank=rank)
        begin = shard.first_row(self.parameter_rows)
        end = min(begin + shard.chunk(self.parameter_rows), self.parameter_rows)
        return range(max(begin, self.first_row), max(begin, self.first_row, min(end, self.first_row + self.rows)))


def deal(matrices: Sequence[Matrix], cost: Callable[[Matrix], int], ranks: int) -> list[list[Matrix]]:
    """Return rounds, costly matrices first, whose n-th is rank n's: loads are even, a round takes little memory."""
    ordered = sorted(matrices, key=cost, reverse=True)
    return [ordered[first : first + ranks] for first in range(0, len(ordered), ranks)]


def compute_replicated(
    dealt: Sequence[Matrix], ranks: RankGroup, function: Callable[[Tensor], Tensor], load: Callable[[Matrix], Tensor]
) -> list[Tensor]:
    """Return `function`, of the same shape, of each matrix of a round; every rank can `load` all. Collective."""
    if ranks.size == 1:
        return [function(load(matrix)) for matrix in dealt]
    largest = max(matrix.rows * matrix.columns for matrix in dealt)
    own = dealt[ranks.rank] if ranks.rank < len(dealt) else None
    some = load(dealt[0] if own is None else own)
    sent = some.new_empty(largest)
    if own is not None:
        _part(sent, own).copy_(function(some))
    gathered = sent.new_empty(ranks.size * largest)
    all_gather_single(gathered, sent, group=ranks.group)
    return [_part(slot, matrix) for slot, matrix in zip(gathered.split(largest), dealt, strict=False)]


def compute_sharded(
    dealt: Sequence[Matrix], ranks: RankGroup, function: Callable[[Tensor], Tensor], load: Callable[[Matrix], Tensor]
) -> list[Tensor]:
    """Return this rank's rows of `function` of each matrix of a round; it can `load` these alone. Collective."""
    if ranks.size == 1:
        return [function(load(matrix)) for matrix in dealt]
    held = torch.cat([load(matrix).flatten() for matrix in dealt])
    counts = [len(matrix.rows_on(ranks.rank, ranks)) * matrix.columns for matrix in dealt]
    sent_counts = counts + [0] * (ranks.size - len(dealt))
    own = dealt[ranks.rank] if ranks.rank < len(dealt) else None
    owned_counts = [0 if own is None else len(own.rows_on(rank, ranks)) * own.columns for rank in range(ranks.size)]
    owned = held.new_empty(sum(owned_counts))
    dist.all_to_all_single(owned, held, owned_counts, sent_counts, group=ranks.group)
    if own is not None:  # shards are consecutive rows in the order of ranks
        owned = function(_part(owned, own)).flatten()
    dist.all_to_all_single(held, owned, sent_counts, owned_counts, group=ranks.group)
    return [part.view(-1, matrix.columns) for part, matrix in zip(held.split(counts), dealt, strict=True)]


def _part(memory: Tensor, matrix: Matrix) -> Tensor:
    return memory[: matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)
