"""The sum tree of a step's gradients, as arithmetic on ranges of leaves: partial sums and the additions between them.

The micro-batches of a step are the leaves, whatever the number of ranks. Each sequence of `run` leaves (a "run") is
added in order; then the results are added pairwise, neighbors first. If a level has an odd number of results, its last
result is added at the next level. A contiguous range of leaves has one partial sum for each of its largest complete
subtrees. If the range contains only a part of a run, leaves at the beginning of the run form one partial sum. Any other
leaves of the run are separate partial sums, because they have to be added, one after another, to the sum before them.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import attrs

from tokens.batches.sampling import odd_factor, rank_shares


@attrs.frozen
class SumTree:
    leaves: int
    run: int  # number of leaves that are added in order before the pairwise tree begins

    def push(self, sums: list[range], part: range) -> int:
        """Append `part` to `sums`, the partial sums of all earlier leaves. Return the number of joins.

        If possible, `part` is joined with the last sum in the list, then with the one before it, and so on.
        """
        joins = 0
        while sums and self._can_join(sums[-1], part):
            part = range(sums.pop().start, part.stop)
            joins += 1
        sums.append(part)
        return joins

    def partial_sums(self, parts: Iterable[range]) -> list[range]:
        """Combine the partial sums of a range's parts, in order, into the partial sums of the whole range."""
        sums: list[range] = []
        for part in parts:
            self.push(sums, part)
        return sums

    def additions(self, parts: Sequence[range]) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Return the in-place additions that turn the partial sums of a range's parts into those of the whole range.

        The first list has rounds of independent additions. Each addition is a pair (target, source) of indices of
        parts: the source is added to the target. The second list has the indices of the parts that contain the results.
        """
        rounds: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        sums: list[range] = []
        results: list[tuple[int, int]] = []  # for each sum in `sums`, its index and the number of rounds that it needs
        for number, part in enumerate(parts):
            target, last_round = number, 0
            for _ in range(self.push(sums, part)):
                source, (target, earlier_round) = target, results.pop()
                last_round = max(last_round, earlier_round) + 1
                rounds[last_round].append((target, source))
            results.append((target, last_round))
        return [rounds[number] for number in sorted(rounds)], [index for index, _ in results]

    def _can_join(self, left: range, right: range) -> bool:
        """Return whether two neighboring partial sums are added to each other."""
        if left.start // self.run == (right.stop - 1) // self.run:
            return left.start % self.run == 0 and len(right) == 1
        pair = range(left.start, min(left.start + 2 * len(left), self.leaves))
        return right.stop == pair.stop and left.start % (2 * len(left)) == 0 and len(left) % self.run == 0


def leaf(number: int) -> range:
    return range(number, number + 1)


def step_tree(determinism: str, microbatches: int, ranks: int) -> SumTree:
    """Return the tree of a step. With `determinism` "run", all leaves of a rank are added in order."""
    return SumTree(microbatches, odd_factor(microbatches) if determinism == "elastic" else microbatches // ranks)


@functools.cache
def most_held_sums(determinism: str, microbatches: int, ranks: int) -> int:
    """Return the largest number of partial sums that a rank has in memory before its last micro-batch.

    Each of them is a copy of all gradients.
    """
    if determinism == "off":
        return 0
    tree, most = step_tree(determinism, microbatches, ranks), 0
    for share in rank_shares(microbatches, ranks):
        sums: list[range] = []
        for number in share[:-1]:
            tree.push(sums, leaf(number))
            most = max(most, len(sums))
    return most
