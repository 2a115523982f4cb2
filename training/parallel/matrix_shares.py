"""Matrices shared out among ranks: each is computed by one rank, whole, and the results go to all of them.

So a matrix has the same bits on any number of ranks and under any wrapper: it is one computation of one shape.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from training.parallel.mesh import HeldPiece, within
from training.parallel.process_group import RankGroup, all_gather_single


@attrs.frozen(kw_only=True)
class Matrix:
    """A matrix in consecutive rows of a parameter."""

    rows: int
    columns: int
    pieces: tuple[tuple[HeldPiece, ...], ...]  # of each rank that shares out the update's work

    def shape(self, piece: HeldPiece) -> tuple[int, int]:
        return len(piece.rows), len(piece.columns or range(self.columns))

    def elements(self, pieces: Iterable[HeldPiece]) -> list[int]:
        return [math.prod(self.shape(piece)) for piece in pieces]

    def joined(self, load: Callable[[HeldPiece], Tensor], pieces: Sequence[HeldPiece]) -> Tensor:
        """Return pieces one after the other, 1-D."""
        parts = [load(piece).flatten() for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def assembled(self, elements: Tensor, pieces: Sequence[HeldPiece]) -> Tensor:
        """Return the matrix, (rows, columns), from its pieces one after the other."""
        if self.are_rows(pieces):
            return _part(elements, self)
        whole = elements.new_empty(self.rows, self.columns)
        for piece, part in zip(pieces, elements.split(self.elements(pieces)), strict=True):
            within(whole, piece.rows, piece.columns).copy_(part.view(self.shape(piece)))
        return whole

    def are_rows(self, pieces: Sequence[HeldPiece]) -> bool:
        """Tell whether pieces one after the other are all rows in their order."""
        rows = [piece.rows for piece in pieces if piece.rows]
        in_order = [0, *(each.stop for each in rows)] == [*(each.start for each in rows), self.rows]
        return in_order and all(piece.columns is None for piece in pieces)


Results = list[tuple[Matrix, HeldPiece, Tensor]]  # of this rank's pieces, (rows, columns) each


def deal(matrices: Sequence[Matrix], cost: Callable[[Matrix], int], ranks: int) -> list[list[Matrix]]:
    """Return rounds, costly matrices first, whose n-th is rank n's: loads are even, a round takes little memory."""
    ordered = sorted(matrices, key=cost, reverse=True)
    return [ordered[first : first + ranks] for first in range(0, len(ordered), ranks)]


def compute_replicated(
    dealt: Sequence[Matrix], ranks: RankGroup, function: Callable[[Tensor], Tensor], load: Callable[[HeldPiece], Tensor]
) -> Results:
    """Return `function`, of the same shape, of each matrix of a round; every rank can `load` all. Collective."""

    def whole(matrix: Matrix) -> Tensor:
        pieces = matrix.pieces[0]
        return load(pieces[0]) if len(pieces) == 1 else matrix.assembled(matrix.joined(load, pieces), pieces)

    if ranks.size == 1:
        found = [function(whole(matrix)) for matrix in dealt]
    else:
        largest = max(matrix.rows * matrix.columns for matrix in dealt)
        own = dealt[ranks.rank] if ranks.rank < len(dealt) else None
        some = whole(dealt[0] if own is None else own)
        sent = some.new_empty(largest)
        if own is not None:
            _part(sent, own).copy_(function(some))
        gathered = sent.new_empty(ranks.size * largest)
        all_gather_single(gathered, sent, group=ranks.group)
        found = [_part(slot, matrix) for slot, matrix in zip(gathered.split(largest), dealt, strict=False)]
    results = zip(dealt, found, strict=True)
    return [
        (one, piece, within(result, piece.rows, piece.columns)) for one, result in results for piece in one.pieces[0]
    ]


def compute_sharded(
    dealt: Sequence[Matrix], ranks: RankGroup, function: Callable[[Tensor], Tensor], load: Callable[[HeldPiece], Tensor]
) -> Results:
    """Return this rank's pieces of `function` of each matrix of a round; it can `load` these alone. Collective."""
    held_pieces = [(matrix, piece) for matrix in dealt for piece in matrix.pieces[ranks.rank]]
    held = torch.cat([load(piece).flatten() for _, piece in held_pieces])
    counts = [sum(matrix.elements(matrix.pieces[ranks.rank])) for matrix in dealt]
    sent_counts = counts + [0] * (ranks.size - len(dealt))
    own = dealt[ranks.rank] if ranks.rank < len(dealt) else None
    owned_counts = [0] * ranks.size if own is None else [sum(own.elements(pieces)) for pieces in own.pieces]
    owned = held.new_empty(sum(owned_counts))
    dist.all_to_all_single(owned, held, owned_counts, sent_counts, group=ranks.group)
    if own is not None:
        pieces = [piece for of_rank in own.pieces for piece in of_rank]
        result = function(own.assembled(owned, pieces))
        owned = result.flatten()
        if not own.are_rows(pieces):
            owned = own.joined(lambda piece: within(result, piece.rows, piece.columns), pieces)
    dist.all_to_all_single(held, owned, sent_counts, owned_counts, group=ranks.group)
    parts = held.split([count for matrix, piece in held_pieces for count in matrix.elements([piece])])
    return [(one, piece, part.view(one.shape(piece))) for (one, piece), part in zip(held_pieces, parts, strict=True)]


def _part(memory: Tensor, matrix: Matrix) -> Tensor:
    return memory[: matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)
