"""Matrices are divided evenly among ranks, each matrix is computed once, and all ranks get the same results."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.axes import Axes, Axis, shard_cut
from tests.model.test_shards import part_of
from tests.training.parallel.conftest import MakeGroup, on_threads
from training.optimizers.muon import matrices_of
from training.parallel.matrix_shares import Matrix, Results, compute_replicated, compute_sharded, make_rounds
from training.parallel.mesh import ON_ONE_RANK, HeldPiece, Spread, within
from training.parallel.process_group import RankGroup


def axes(rows: list[Axis], columns: Axis) -> Axes:
    return Axes(rows=tuple(rows), columns=columns, embedding=False)


# Each row axis of a parameter stands for one matrix. In "b", two tensor shards share each key-value head.
AXES = {
    "a": axes([Axis("embed", 5)], Axis("mlp", 4)),
    "b": axes([Axis("heads", 8, 4), Axis("kv_heads", 6, 2), Axis("kv_heads", 6, 2)], Axis("embed", 3)),
    "c": axes([Axis("embed", 1)], Axis("heads", 8, 4)),
    "d": axes([Axis("mlp", 12)], Axis("embed", 3)),
}
REPLICATED = [(ranks, (1, 1, shards)) for ranks in (1, 2, 3, 4) for shards in (1, 4)]
# The three numbers of a spread: row shards, tensor ranks, and tensor shards (which the tensor ranks hold together)
SPREADS = [(2, 1, 1), (3, 1, 1), (4, 1, 1), (2, 1, 4), (1, 2, 2), (1, 2, 4), (1, 4, 4), (2, 2, 4), (3, 2, 4)]


def matrices(given_axes: dict[str, Axes], spread: Spread = ON_ONE_RANK) -> list[Matrix]:
    return [
        matrix
        for name, parameter_axes in given_axes.items()
        for matrix in matrices_of(name, parameter_axes, spread, split=True)
    ]


def cost(matrix: Matrix) -> int:
    return matrix.rows**2


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 8))
def test_matrices_are_divided_evenly_among_ranks(heights: list[int], ranks: int) -> None:
    named = {str(index): axes([Axis("embed", rows)], Axis("embed", 3)) for index, rows in enumerate(heights)}
    given_matrices = matrices(named)
    rounds = make_rounds(given_matrices, cost, ranks)
    assert sorted(str(matrix) for round_matrices in rounds for matrix in round_matrices) == sorted(
        map(str, given_matrices)
    )
    assert {len(round_matrices) for round_matrices in rounds[:-1]} <= {ranks}
    costs = [cost(matrix) for matrix in given_matrices]
    # In each round, the ranks wait for the slowest rank.
    total_cost = sum(max(map(cost, round_matrices)) for round_matrices in rounds)
    assert total_cost <= sum(costs) / ranks + max(costs)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_matrix_shards_are_rows_in_rank_order(size: int) -> None:
    for matrix in matrices(AXES, Spread(ranks=RankGroup(rank=0, size=size), row_shards=size)):
        assert len(matrix.pieces) == size
        rows = [row for pieces in matrix.pieces for piece in pieces for row in piece.rows]
        assert rows == list(range(matrix.rows))
        assert matrix.are_rows([piece for pieces in matrix.pieces for piece in pieces])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("replicas", "spread"), [*REPLICATED, *((1, spread) for spread in SPREADS)])
def test_all_ranks_get_the_result_for_the_full_matrix(
    replicas: int, spread: tuple[int, int, int], kind: torch.dtype
) -> None:
    row_shards, tensor_size, shards = spread
    size, local = replicas * row_shards * tensor_size, shards // tensor_size
    parameters = {name: torch.randn(parameter_axes.shape).to(kind) for name, parameter_axes in AXES.items()}

    def local_piece(rank: int, piece: HeldPiece) -> torch.Tensor:
        """Return a piece of a parameter as a view of the part that a rank holds."""
        *path, name = piece.parameter.split(".")
        shard = rank % tensor_size * local + int(path[1] if path else 0)
        part = part_of(parameters[name], shard_cut(AXES[name], shards, shard))
        row_ranks = RankGroup(rank=rank // tensor_size, size=row_shards)
        return within(part[row_ranks.first_row(len(part)) :][: row_ranks.chunk(len(part))], piece.local_rows, None)

    def function(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.T.contiguous().T * matrix.norm()  # depends on all rows, and changes the memory layout

    layout = Spread(row_shards=row_shards, tensor_shards=shards, tensor_size=tensor_size)
    pieces = [piece for matrix in matrices(AXES) for [piece] in matrix.pieces]
    values = [within(parameters[piece.parameter], piece.local_rows, None) for piece in pieces]
    full_matrices = dict(zip(matrices(AXES, layout), values, strict=True))

    def compute_on(rank: int, make_group: MakeGroup) -> Results:
        all_ranks = make_group("all", rank, size)
        compute, place = (compute_sharded, rank) if layout.sharded else (compute_replicated, 0)
        rounds = make_rounds(list(full_matrices), cost, size)
        return [
            entry
            for round_matrices in rounds
            for entry in compute(round_matrices, all_ranks, function, lambda piece: local_piece(place, piece))
        ]

    for rank, results in enumerate(on_threads(compute_on, size)):
        place = 0 if replicas == size else rank
        expected_pieces = {piece for matrix in full_matrices for piece in matrix.pieces[place]}
        assert {piece for _, piece, _ in results} == expected_pieces
        for matrix, piece, output in results:
            assert (output.dtype, output.shape) == (kind, local_piece(place, piece).shape)
            assert torch.equal(output, within(function(full_matrices[matrix]), piece.rows, piece.columns))
