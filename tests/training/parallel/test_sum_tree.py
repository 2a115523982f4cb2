"""The sum tree: however the leaves are divided among ranks, the additions are the same as in one process.

Other tests check the number of partial sums.
"""

import itertools
from typing import Any

import pytest

from tests.training.parallel.test_ordered_reduce import tree_sum
from tokens.batches.sampling import rank_shares
from training.parallel.sum_tree import SumTree, leaf, most_held_sums, step_tree

Sum = Any  # the number of a leaf, or a pair of sums that are added


def finish(tree: SumTree, parts: list[range], sums: list[Sum]) -> list[Sum]:
    """Add the partial sums of a range's parts, as the tree does, and return the partial sums of the whole range."""
    rounds, results = tree.additions(parts)
    for pairs in rounds:
        places = list(itertools.chain(*pairs))
        assert len(set(places)) == len(places)  # the additions of a round are independent
        for target, source in pairs:
            sums[target] = (sums[target], sums[source])
    return [sums[target] for target in results]


def sum_of_share(tree: SumTree, share: range) -> tuple[list[range], list[Sum]]:
    """Push a rank's leaves one by one, and return the rank's ranges and partial sums."""
    ranges: list[range] = []
    sums: list[Sum] = []
    for number in share:
        total: Sum = number
        for _ in range(tree.push(ranges, leaf(number))):
            total = (sums.pop(), total)
        sums.append(total)
    assert ranges == tree.partial_sums(map(leaf, share))
    return ranges, sums


@pytest.mark.parametrize("determinism", ["elastic", "run"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_all_layouts_add_like_one_process(determinism: str, nodes: int) -> None:
    for leaves in range(1, 65):
        for size in range(1, leaves // nodes + 1):
            if determinism == "run" and leaves % (nodes * size):
                continue
            tree, shares = step_tree(determinism, leaves, nodes * size), rank_shares(leaves, nodes * size)
            node_ranges: list[range] = []
            sums: list[Sum] = []
            for node in range(nodes):
                parts = [sum_of_share(tree, share) for share in shares[node * size : (node + 1) * size]]
                ranges = [part for rank_ranges, _ in parts for part in rank_ranges]
                sums += finish(tree, ranges, [value for _, rank_sums in parts for value in rank_sums])
                node_ranges += tree.partial_sums(ranges)
            expected = tree_sum(list(range(leaves)), tree.run, lambda *pair: pair)
            assert finish(tree, node_ranges, sums) == [expected], (leaves, size)


def test_ranges_have_partial_sums_of_largest_subtrees() -> None:
    def partial_sums(leaves: int, begin: int, end: int) -> list[tuple[int, int]]:
        sums = step_tree("elastic", leaves, 1).partial_sums(map(leaf, range(begin, end)))
        return [(part.start, part.stop) for part in sums]

    assert partial_sums(8, 0, 8) == [(0, 8)]
    assert partial_sums(8, 1, 7) == [(1, 2), (2, 4), (4, 6), (6, 7)]
    # The tree adds 3 leaves at a time: (2, 3) is the end of a group, (3, 6) a group, (6, 8) the beginning of one.
    assert partial_sums(12, 2, 8) == [(2, 3), (3, 6), (6, 8)]
    assert partial_sums(7, 3, 6) == [(3, 4), (4, 5), (5, 6)]


def test_each_tree_level_holds_one_partial_sum() -> None:
    assert [most_held_sums("elastic", 8 * ranks, ranks) for ranks in (1, 2, 8)] == [3, 3, 3]
    assert [most_held_sums("run", 8 * ranks, ranks) for ranks in (1, 2, 3, 8)] == [1, 1, 1, 1]
    assert most_held_sums("elastic", 12, 1) == 3  # sums of 6 and of 3 leaves, and one in progress
    assert most_held_sums("off", 64, 8) == 0  # sums are not ordered
