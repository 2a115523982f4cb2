"""Matrices shared out among ranks: each computed once, evenly, with the same results on all ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.parallel.conftest import MakeGroup, on_threads
from training.parallel.matrix_shares import Matrix, compute_replicated, compute_sharded, deal
from training.parallel.process_group import RankGroup

HEIGHTS = {"a": [5], "b": [3, 2, 2], "c": [1], "d": [6]}  # rows of the matrices of each parameter
COLUMNS = 3


def matrices(heights: dict[str, list[int]], columns: int = COLUMNS) -> list[Matrix]:
    return [
        Matrix(parameter=name, parameter_rows=sum(own), first_row=sum(own[:index]), rows=rows, columns=columns)
        for name, own in heights.items()
        for index, rows in enumerate(own)
    ]


def cost(matrix: Matrix) -> int:
    return matrix.rows**2


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 8))
def test_each_matrix_is_dealt_once_and_no_rank_has_more_than_its_part_and_one(heights: list[int], ranks: int) -> None:
    given_matrices = matrices({str(index): [rows] for index, rows in enumerate(heights)})
    rounds = deal(given_matrices, cost, ranks)
    assert sorted(str(matrix) for dealt in rounds for matrix in dealt) == sorted(map(str, given_matrices))
    assert {len(dealt) for dealt in rounds[:-1]} <= {ranks}
    costs = [cost(matrix) for matrix in given_matrices]
    one_after_the_other = sum(max(map(cost, dealt)) for dealt in rounds)  # ranks wait for each other in each round
    assert one_after_the_other <= sum(costs) / ranks + max(costs)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_the_shards_of_a_matrix_are_its_rows_in_the_order_of_ranks(size: int) -> None:
    ranks = RankGroup(rank=0, size=size)
    for matrix in matrices(HEIGHTS):
        rows = [row for rank in range(size) for row in matrix.rows_on(rank, ranks)]
        assert rows == list(range(matrix.first_row, matrix.first_row + matrix.rows))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_all_ranks_get_what_one_rank_computes_of_the_whole_matrix(ranks: int, kind: torch.dtype, sharded: bool) -> None:
    parameters = {name: torch.randn(sum(own), COLUMNS).to(kind) for name, own in HEIGHTS.items()}

    def whole(matrix: Matrix) -> torch.Tensor:
        return parameters[matrix.parameter][matrix.first_row : matrix.first_row + matrix.rows]

    def function(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.T.contiguous().T * matrix.norm()  # of all rows; another layout in memory

    def compute_on(rank: int, make_group: MakeGroup) -> list[tuple[Matrix, torch.Tensor]]:
        own = make_group("all", rank, ranks)

        def held(matrix: Matrix) -> torch.Tensor:
            rows = matrix.rows_on(rank, own)
            return parameters[matrix.parameter][rows.start : rows.stop]

        compute, load = (compute_sharded, held) if sharded else (compute_replicated, whole)
        rounds = deal(matrices(HEIGHTS), cost, ranks)
        return [pair for dealt in rounds for pair in zip(dealt, compute(dealt, own, function, load), strict=True)]

    for of_ranks in zip(*on_threads(compute_on, ranks), strict=True):
        expected = function(whole(of_ranks[0][0]))
        found = [result for _, result in of_ranks]
        assert all(result.dtype == kind for result in found)
        for result in [torch.cat(found)] if sharded else found:
            assert torch.equal(result, expected)
