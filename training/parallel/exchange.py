"""Exchange of partial sums among ranks, and the additions that complete the ordered sum (ordered_reduce.py).

Each rank gets its part of every rank's partial sums by an all-to-all, adds them in the tree, and shares the result by
an all-gather. With one partial sum a rank, the bytes moved are those of a ring all-reduce: 2 (D - 1) / D of the
gradient on D ranks. On two levels the ranks of a node do so first; then each adds its part of the node's partial sums
to those of other nodes. With one of each of R nodes, 2 (R - 1) / R of the gradient go over a node's link, the least
that can.
"""

from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.parallel.mesh import Levels
from training.parallel.process_group import RankGroup, all_gather_single
from training.parallel.sum_tree import SumTree, leaf

# Elements of partial sums that a rank sends at a time: a GPU's memory for them is its stream's own for good, and DDP's
# first bucket has all parameters.
PIECE = 1 << 24


@attrs.frozen(kw_only=True)
class Exchange:
    ranks: RankGroup
    counts: list[int]  # partial sums of each rank
    piece: int  # elements of each that are sent at a time
    rounds: list[list[tuple[int, int]]]  # of additions, as SumTree.additions returns them
    results: list[int]  # places of the partial sums of all ranks together

    @classmethod
    def of(cls, parts: list[list[range]], tree: SumTree, ranks: RankGroup, most: int) -> "Exchange":
        """Return the exchange of these partial sums of each rank. `most`: how many any rank of the job has."""
        rounds, results = tree.additions([part for own in parts for part in own])
        counts, piece = [len(own) for own in parts], max(1, PIECE // most)
        return cls(ranks=ranks, counts=counts, piece=piece, rounds=rounds, results=results)

    def received_elements(self, elements: int) -> int:
        """Return the elements of all partial sums that a rank receives, of buffers of so many."""
        return sum(self.counts) * elements // self.ranks.size

    def reduce_scatter(self, parts: list[Tensor], received: Tensor) -> list[Tensor]:
        """Return this rank's part of the partial sums of all ranks together, in the memory of `received`.

        `parts`: this rank's, 1-D, of a length that the number of ranks divides.
        """
        length = len(parts[-1]) // self.ranks.size
        rows: list[list[Tensor]] = [[] for _ in self.counts]
        for number in range(max(self.counts)):  # each rank's first partial sum, then each one's second
            senders = [rank for rank, count in enumerate(self.counts) if count > number]
            now, received = received.tensor_split([len(senders) * length])
            self._all_to_all(now, parts[number] if number < len(parts) else parts[0][:0], senders)
            for rank, row in zip(senders, now.split(length), strict=True):
                rows[rank].append(row)
        ordered = [row for own in rows for row in own]
        for pairs in self.rounds:
            torch._foreach_add_([ordered[place] for place, _ in pairs], [ordered[added] for _, added in pairs])
        return [ordered[place] for place in self.results]

    def _all_to_all(self, received: Tensor, sent: Tensor, senders: list[int]) -> None:
        """Exchange equal parts of the senders' tensors; the other ranks have an empty one."""
        size, splits, sent_splits = self.ranks.size, None, None
        if len(senders) < size:
            length = len(received) // len(senders)
            splits = [length if rank in senders else 0 for rank in range(size)]
            sent_splits = [len(sent) // size] * size
        dist.all_to_all_single(received, sent, splits, sent_splits, group=self.ranks.group)


def exchanges(tree: SumTree, shares: Sequence[range], levels: Levels) -> tuple[Exchange, ...]:
    """Return the exchange of each level, where data-parallel rank r owns shares[r]: inside this node, then across."""
    size, across = levels.inside.size, levels.across
    parts = [tree.partial_sums(map(leaf, share)) for share in shares]
    nodes = [parts[first : first + size] for first in range(0, len(parts), size)]
    made = [Exchange.of(nodes[across.rank], tree, levels.inside, max(map(len, parts)))]
    if across.size > 1:
        of_nodes = [tree.partial_sums(part for own in node for part in own) for node in nodes]
        made.append(Exchange.of(of_nodes, tree, across, max(map(len, of_nodes))))
    return tuple(made)


def ordered_reduce_scatter(parts: list[Tensor], received: Tensor, levels: tuple[Exchange, ...]) -> Tensor:
    """Return this rank's part of the sum of all leaves, in the memory of `received`; `parts` as for the first level."""
    own = levels[0].reduce_scatter(parts, received)
    if len(levels) > 1:
        ordered_all_reduce(own[-1], [[part] for part in own[:-1]], levels[1:])
    return own[-1]


def ordered_all_reduce(last: Tensor, earlier: list[list[Tensor]], levels: tuple[Exchange, ...]) -> None:
    """Replace this rank's last partial sum, 1-D, by the sum of all leaves, on every rank.

    `earlier`: its other partial sums, each as tensors whose elements in order are those of `last`.
    """
    first = levels[0]
    for begin, piece in zip(range(0, len(last), first.piece), last.split(first.piece), strict=True):
        padding = -len(piece) % first.ranks.size
        parts = [*(_elements(tensors, begin, begin + len(piece)) for tensors in earlier), piece]
        padded = [nn.functional.pad(part, (0, padding)) for part in parts] if padding else parts
        received = piece.new_empty(first.received_elements(len(piece) + padding))
        all_gather_single(padded[-1], ordered_reduce_scatter(padded, received, levels), group=first.ranks.group)
        if padding:
            piece.copy_(padded[-1][: len(piece)])


def _elements(tensors: list[Tensor], begin: int, end: int) -> Tensor:
    """Return the elements from `begin` to `end` of tensors laid end to end, 1-D."""
    parts = []
    for tensor in tensors:
        if begin < tensor.numel() and end > 0:
            parts.append(tensor.flatten()[max(begin, 0) : end])
        begin, end = begin - tensor.numel(), end - tensor.numel()
    return torch.cat(parts)
