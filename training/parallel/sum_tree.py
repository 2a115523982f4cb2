"""Sum tree of a step's gradients, as arithmetic on ranges of leaves: partial sums, and the additions that finish them.

The micro-batches of a step are the leaves, whatever the number of ranks. Runs of `run` leaves are added in order, then
the results pairwise, neighbors first; an odd last one joins at the next level. A contiguous range of leaves has one
partial sum for each of its largest complete subtrees. Of a run that it cuts, a beginning is one partial sum, and other
leaves are one each, because they are added in order to the sum before them.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import attrs

from tokens.batches.sampling import odd_factor, rank_shares


@attrs.frozen
class SumTree:
    leaves: int
    run: int  # leaves added in order before the pairwise tree begins

    def push(self, sums: list[range], following: range) -> int:
        """Add a partial sum to those of the leaves before it; return how many of these it is added to, last first."""
        joined = 0
        while sums and self._joins(sums[-1], following):
            following = range(sums.pop().start, following.stop)
            joined += 1
        sums.append(following)
        return joined

    def partial_sums(self, parts: Iterable[range]) -> list[range]:
        """Return the partial sums of a range from those of its parts, in order."""
        sums: list[range] = []
        for part in parts:
            self.push(sums, part)
        return sums

    def additions(self, parts: Sequence[range]) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Return how to make the partial sums of a range from those of its parts, in place.

        First rounds of pairs of places: the second place's is added to the first's, in any order within a round. Then
        the places of the results.
        """
        rounds: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        sums: list[range] = []
        made: list[tuple[int, int]] = []  # place of each of `sums`, and the rounds that it takes
        for number, part in enumerate(parts):
            place, last = number, 0
            for _ in range(self.push(sums, part)):
                added, (place, before) = place, made.pop()
                last = max(last, before) + 1
                rounds[last].append((place, added))
            made.append((place, last))
        return [rounds[number] for number in sorted(rounds)], [place for place, _ in made]

    def _joins(self, left: range, right: range) -> bool:
        """Tell whether two neighboring partial sums are added to each other."""
        if left.start // self.run == (right.stop - 1) // self.run:
            return left.start % self.run == 0 and len(right) == 1
        pair = range(left.start, min(left.start + 2 * len(left), self.leaves))
        return right.stop == pair.stop and left.start % (2 * len(left)) == 0 and len(left) % self.run == 0


def leaf(number: int) -> range:
    return range(number, number + 1)


def step_tree(determinism: str, microbatches: int, ranks: int) -> SumTree:
    """Return the tree of a step: with `determinism` "run", all leaves of a rank are added in order."""
    return SumTree(microbatches, odd_factor(microbatches) if determinism == "elastic" else microbatches // ranks)


@functools.cache
def most_held_sums(determinism: str, microbatches: int, ranks: int) -> int:
    """Return the partial sums that a rank holds at most before its last micro-batch, each a copy of all gradients."""
    if determinism == "off":
        return 0
    tree, most = step_tree(determinism, microbatches, ranks), 0
    for share in rank_shares(microbatches, ranks):
        sums: list[range] = []
        for number in share[:-1]:
            tree.push(sums, leaf(number))
            most = max(most, len(sums))
    return most
