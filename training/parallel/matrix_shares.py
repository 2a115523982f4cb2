"""Divide computations on matrices among ranks: each matrix is computed by a single rank, and all ranks get the result.

A result has the same bits on any number of ranks and under any wrapper, because it always comes from a single
computation of the same shape.
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
    """A matrix that consists of consecutive rows of a parameter."""

    rows: int
    columns: int
    pieces: tuple[tuple[HeldPiece, ...], ...]  # for each rank of the update, the pieces that the rank holds

    def shape(self, piece: HeldPiece) -> tuple[int, int]:
        return len(piece.rows), len(piece.columns or range(self.columns))

    def elements(self, pieces: Iterable[HeldPiece]) -> list[int]:
        return [math.prod(self.shape(piece)) for piece in pieces]

    def joined(self, load: Callable[[HeldPiece], Tensor], pieces: Sequence[HeldPiece]) -> Tensor:
        """Return the elements of these pieces as a 1-D tensor, one piece after another."""
        parts = [load(piece).flatten() for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def assembled(self, elements: Tensor, pieces: Sequence[HeldPiece]) -> Tensor:
        """Assemble the (rows, columns) matrix from `elements`, which contains the pieces one after another."""
        if self.are_rows(pieces):
            return _part(elements, self)
        matrix = elements.new_empty(self.rows, self.columns)
        for piece, part in zip(pieces, elements.split(self.elements(pieces)), strict=True):
            within(matrix, piece.rows, piece.columns).copy_(part.view(self.shape(piece)))
        return matrix

    def are_rows(self, pieces: Sequence[HeldPiece]) -> bool:
        """Return whether these pieces together make up all rows of the matrix, complete and in order."""
        rows = [piece.rows for piece in pieces if piece.rows]
        in_order = [0, *(part.stop for part in rows)] == [*(part.start for part in rows), self.rows]
        return in_order and all(piece.columns is None for piece in pieces)


Results = list[tuple[Matrix, HeldPiece, Tensor]]  # the result for each of this rank's pieces, (rows, columns)


def make_rounds(matrices: Sequence[Matrix], cost: Callable[[Matrix], int], ranks: int) -> list[list[Matrix]]:
    """Divide matrices into rounds, the costliest matrices first. Rank n computes the n-th matrix of a round.

    This order gives the ranks similar loads, and dividing into rounds saves memory.
    """
    ordered = sorted(matrices, key=cost, reverse=True)
    return [ordered[first : first + ranks] for first in range(0, len(ordered), ranks)]


def compute_replicated(
    matrices: Sequence[Matrix],
    ranks: RankGroup,
    function: Callable[[Tensor], Tensor],
    load: Callable[[HeldPiece], Tensor],
) -> Results:
    """Apply `function`, which does not change the shape, to each matrix of a round.

    Use this function if each rank can `load` all pieces. Call it on every rank.
    """

    def load_matrix(matrix: Matrix) -> Tensor:
        pieces = matrix.pieces[0]
        return load(pieces[0]) if len(pieces) == 1 else matrix.assembled(matrix.joined(load, pieces), pieces)

    if ranks.size == 1:
        outputs = [function(load_matrix(matrix)) for matrix in matrices]
    else:
        largest = max(matrix.rows * matrix.columns for matrix in matrices)
        assigned = matrices[ranks.rank] if ranks.rank < len(matrices) else None
        inputs = load_matrix(matrices[0] if assigned is None else assigned)
        sent = inputs.new_empty(largest)
        if assigned is not None:
            _part(sent, assigned).copy_(function(inputs))
        gathered = sent.new_empty(ranks.size * largest)
        all_gather_single(gathered, sent, group=ranks.group)
        outputs = [_part(slot, matrix) for slot, matrix in zip(gathered.split(largest), matrices, strict=False)]
    return [
        (matrix, piece, within(output, piece.rows, piece.columns))
        for matrix, output in zip(matrices, outputs, strict=True)
        for piece in matrix.pieces[0]
    ]


def compute_sharded(
    matrices: Sequence[Matrix],
    ranks: RankGroup,
    function: Callable[[Tensor], Tensor],
    load: Callable[[HeldPiece], Tensor],
) -> Results:
    """Apply `function` to each matrix of a round, and return this rank's pieces of the results.

    Use this function if ranks can `load` only their own pieces. Call it on every rank.
    """
    local_pieces = [(matrix, piece) for matrix in matrices for piece in matrix.pieces[ranks.rank]]
    local = torch.cat([load(piece).flatten() for _, piece in local_pieces])
    counts = [sum(matrix.elements(matrix.pieces[ranks.rank])) for matrix in matrices]
    sent_counts = counts + [0] * (ranks.size - len(matrices))
    assigned = matrices[ranks.rank] if ranks.rank < len(matrices) else None
    received_counts = [0] * ranks.size
    if assigned is not None:
        received_counts = [sum(assigned.elements(pieces)) for pieces in assigned.pieces]
    elements = local.new_empty(sum(received_counts))
    dist.all_to_all_single(elements, local, received_counts, sent_counts, group=ranks.group)
    if assigned is not None:
        pieces = [piece for rank_pieces in assigned.pieces for piece in rank_pieces]
        output = function(assigned.assembled(elements, pieces))
        elements = output.flatten()
        if not assigned.are_rows(pieces):
            elements = assigned.joined(lambda piece: within(output, piece.rows, piece.columns), pieces)
    dist.all_to_all_single(local, elements, sent_counts, received_counts, group=ranks.group)
    parts = local.split([count for matrix, piece in local_pieces for count in matrix.elements([piece])])
    return [
        (matrix, piece, part.view(matrix.shape(piece)))
        for (matrix, piece), part in zip(local_pieces, parts, strict=True)
    ]


def _part(memory: Tensor, matrix: Matrix) -> Tensor:
    return memory[: matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)
