"""Counts of the sum's tree are those of the reduction itself."""

import pytest
import torch

from training.parallel.ordered_reduce import LeafSum
from training.parallel.sum_tree import elastic_world_sizes, most_held_sums, run_length


@pytest.mark.parametrize("determinism", ["run", "elastic"])
@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 6, 8, 12])
def test_a_rank_holds_as_many_sums_as_the_reduction(determinism: str, world_size: int, accumulation: int) -> None:
    total, held = LeafSum(run_length(determinism, accumulation, world_size)), [0]
    for _ in range(accumulation - 1):  # the last micro-batch's gradients are not copied
        total.add([torch.zeros(1)])
        held.append(len(total._partial))
    assert most_held_sums(determinism, accumulation, world_size) == max(held)


def test_nothing_is_held_where_no_order_is_kept() -> None:
    assert most_held_sums("off", 8, 8) == 0


def test_legal_world_sizes_are_the_powers_of_two_that_divide() -> None:
    assert elastic_world_sizes(8) == [1, 2, 4, 8]
    assert elastic_world_sizes(12) == [1, 2, 4]
    assert elastic_world_sizes(7) == [1]
