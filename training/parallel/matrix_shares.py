"""Matrices shared out among ranks: each is computed by one rank, whole, and the results go to all of them.

So a matrix has the same bits on any number of ranks and under any wrapper: it is one computation of one shape.
"""

from collections.abc import Callable, Iterable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from training.parallel.mesh import Piece, within
from training.parallel.process_group import RankGroup, all_gather_single


@attrs.frozen(kw_only=True)
class Matrix:
    """A matrix in consecutive rows of a parameter."""

    parameter: str  # its name in the network
    first_row: int
    rows: int
    columns: int
    pieces: tuple[tuple[Piece, ...], ...]  # of each rank that shares out the update's work

    def elements(self, pieces: Iterable[Piece]) -> int:
        return sum(len(piece.rows) * len(piece.columns or range(self.columns)) for piece in pieces)


def deal(matrices: Sequence[Matrix], cost: Callable[[Matrix], int], ranks: int) -> list[list[Matrix]]:
    """Return rounds, costly matrices first, whose n-th is rank n's: loads are even, a round takes little memory."""
    ordered = sorted(matrices, key=cost, reverse=True)
    return [ordered[first : first + ranks] for first in range(0, len(ordered), ranks)]


def compute_replicated(
    dealt: Sequence[Matrix],
    ranks: RankGroup,
    function: Callable[[Tensor], Tensor],
    load: Callable[[Piece], Tensor],
) -> list[Tensor]:
    """Return `function`, of the same shape, of each matrix of a round; every rank can `load` all. Collective."""

    def whole(matrix: Matrix) -> Tensor:
        [pieces] = matrix.pieces
        return load(pieces[0]) if len(pieces) == 1 else _assembled(matrix, _joined(matrix, 0, load), pieces)

    if ranks.size == 1:
        return [function(whole(matrix)) for matrix in dealt]
    largest = max(matrix.rows * matrix.columns for matrix in dealt)
    own = dealt[ranks.rank] if ranks.rank < len(dealt) else None
    some = whole(dealt[0] if own is None else own)
    sent = some.new_empty(largest)
    if own is not None:
        _part(sent, own).copy_(function(some))
    gathered = sent.new_empty(ranks.size * largest)
    all_gather_single(gathered, sent, group=ranks.group)
    return [_part(slot, matrix) for slot, matrix in zip(gathered.split(largest), dealt, strict=False)]


def compute_sharded(
    dealt: Sequence[Matrix],
    ranks: RankGroup,
    function: Callable[[Tensor], Tensor],
    load: Callable[[Piece], Tensor],
) -> list[Tensor]:
    """Return this rank's pieces of `function` of each matrix of a round, 1-D; it can `load` these alone. Collective."""
    held = torch.cat([_joined(matrix, ranks.rank, load) for matrix in dealt])
    counts = [matrix.elements(matrix.pieces[ranks.rank]) for matrix in dealt]
    sent_counts = counts + [0] * (ranks.size - len(dealt))
    own = dealt[ranks.rank] if ranks.rank < len(dealt) else None
    owned_counts = [0] * ranks.size if own is None else [own.elements(pieces) for pieces in own.pieces]
    owned = held.new_empty(sum(owned_counts))
    dist.all_to_all_single(owned, held, owned_counts, sent_counts, group=ranks.group)
    if own is not None:
        pieces = [piece for of_rank in own.pieces for piece in of_rank]
        result = function(_assembled(own, owned, pieces))
        owned = (
            result.flatten()
            if _is_whole(own, pieces)
            else torch.cat([within(result, piece.rows, piece.columns).flatten() for piece in pieces])
        )
    dist.all_to_all_single(held, owned, sent_counts, owned_counts, group=ranks.group)
    return list(held.split(counts))


def _joined(matrix: Matrix, rank: int, load: Callable[[Piece], Tensor]) -> Tensor:
    """Return the pieces of a matrix on a rank, 1-D, one after the other."""
    parts = [load(piece).flatten() for piece in matrix.pieces[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _assembled(matrix: Matrix, elements: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Return the matrix from those of its pieces, one after the other."""
    if _is_whole(matrix, pieces):
        return _part(elements, matrix)
    whole = elements.new_empty(matrix.rows, matrix.columns)
    for piece, part in zip(pieces, elements.split([matrix.elements([piece]) for piece in pieces]), strict=True):
        within(whole, piece.rows, piece.columns).copy_(part.view(within(whole, piece.rows, piece.columns).shape))
    return whole


def _is_whole(matrix: Matrix, pieces: Sequence[Piece]) -> bool:
    """Tell whether pieces one after the other are the matrix: whole rows in their order."""
    rows = [row for piece in pieces for row in (piece.rows.start, piece.rows.stop) if piece.rows]
    return (
        rows == sorted(rows)
        and all(piece.columns is None for piece in pieces)
        and matrix.elements(pieces) == (matrix.rows * matrix.columns)
    )


def _part(memory: Tensor, matrix: Matrix) -> Tensor:
    return memory[: matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)
