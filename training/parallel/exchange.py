"""The exchange of partial sums among ranks, and the additions that complete the ordered sum (ordered_reduce.py).

In an all-to-all, each rank receives its part of every rank's partial sums. It adds them in the order of the tree, and
an all-gather gives the result to all ranks. With one partial sum per rank, this moves the same number of bytes as a
ring all-reduce: 2 (D - 1) / D of the gradient on D ranks. On two levels, the ranks of a node do this first; then each
rank adds its part of the node's partial sums to the corresponding parts from the other nodes. With one partial sum for
each of R nodes, 2 (R - 1) / R of the gradient passes over a node's link, which is the minimum possible.
"""

from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.parallel.mesh import Levels
from training.parallel.process_group import RankGroup, all_gather_single
from training.parallel.sum_tree import SumTree, leaf

# Number of elements of partial sums that a rank sends at a time. The limit saves memory, because DDP's first bucket has
# all parameters, and on a GPU, torch never gives one stream's memory to another stream.
PIECE = 1 << 24


@attrs.frozen(kw_only=True)
class Exchange:
    ranks: RankGroup
    counts: list[int]  # number of partial sums of each rank
    piece: int  # number of elements that are sent at a time from each partial sum
    rounds: list[list[tuple[int, int]]]  # the rounds of additions that SumTree.additions returns
    results: list[int]  # after the rounds, the parts with these indices are the combined partial sums

    @classmethod
    def of(cls, parts: list[list[range]], tree: SumTree, ranks: RankGroup, most: int) -> "Exchange":
        """Return the exchange of the partial sums `parts`, which are listed by rank.

        `most` is the largest number of partial sums that any rank of the job has.
        """
        rounds, results = tree.additions([part for rank_parts in parts for part in rank_parts])
        counts, piece = [len(rank_parts) for rank_parts in parts], max(1, PIECE // most)
        return cls(ranks=ranks, counts=counts, piece=piece, rounds=rounds, results=results)

    def received_elements(self, elements: int) -> int:
        """Return the number of elements that a rank receives, given the number of elements in each partial sum."""
        return sum(self.counts) * elements // self.ranks.size

    def reduce_scatter(self, parts: list[Tensor], received: Tensor) -> list[Tensor]:
        """Combine the partial sums of all ranks. Return this rank's part of the results, in the memory of `received`.

        `parts` are this rank's partial sums. They are 1-D, and their length is a multiple of the number of ranks.
        """
        length = len(parts[-1]) // self.ranks.size
        rows: list[list[Tensor]] = [[] for _ in self.counts]
        for number in range(max(self.counts)):  # all ranks exchange their first partial sums, then their second ones
            senders = [rank for rank, count in enumerate(self.counts) if count > number]
            incoming, received = received.tensor_split([len(senders) * length])
            self._all_to_all(incoming, parts[number] if number < len(parts) else parts[0][:0], senders)
            for rank, row in zip(senders, incoming.split(length), strict=True):
                rows[rank].append(row)
        ordered = [row for rank_rows in rows for row in rank_rows]
        for pairs in self.rounds:
            torch._foreach_add_([ordered[target] for target, _ in pairs], [ordered[source] for _, source in pairs])
        return [ordered[place] for place in self.results]

    def _all_to_all(self, received: Tensor, sent: Tensor, senders: list[int]) -> None:
        """Exchange equal parts of the senders' tensors. All other ranks pass an empty tensor as `sent`."""
        size, splits, sent_splits = self.ranks.size, None, None
        if len(senders) < size:
            length = len(received) // len(senders)
            splits = [length if rank in senders else 0 for rank in range(size)]
            sent_splits = [len(sent) // size] * size
        dist.all_to_all_single(received, sent, splits, sent_splits, group=self.ranks.group)


def exchanges(tree: SumTree, shares: Sequence[range], levels: Levels) -> tuple[Exchange, ...]:
    """Return the exchange of each level: inside this node, then across nodes. Data-parallel rank r owns shares[r]."""
    size, across = levels.inside.size, levels.across
    parts = [tree.partial_sums(map(leaf, share)) for share in shares]
    nodes = [parts[first : first + size] for first in range(0, len(parts), size)]
    level_exchanges = [Exchange.of(nodes[across.rank], tree, levels.inside, max(map(len, parts)))]
    if across.size > 1:
        node_parts = [tree.partial_sums(part for rank_parts in node for part in rank_parts) for node in nodes]
        level_exchanges.append(Exchange.of(node_parts, tree, across, max(map(len, node_parts))))
    return tuple(level_exchanges)


def ordered_reduce_scatter(parts: list[Tensor], received: Tensor, levels: tuple[Exchange, ...]) -> Tensor:
    """Return this rank's part of the sum of all leaves, in the memory of `received`.

    `parts` and `received` are passed to the first level's `Exchange.reduce_scatter`.
    """
    sums = levels[0].reduce_scatter(parts, received)
    if len(levels) > 1:
        ordered_all_reduce(sums[-1], [[part] for part in sums[:-1]], levels[1:])
    return sums[-1]


def ordered_all_reduce(last: Tensor, earlier: list[list[Tensor]], levels: tuple[Exchange, ...]) -> None:
    """Replace this rank's last partial sum, which is 1-D, with the sum of all leaves. All ranks get the same sum.

    `earlier` has the other partial sums of this rank. Each of them is a list of tensors. The elements of the
    concatenated tensors correspond to the elements of `last`.
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
    """Return the elements from `begin` to `end` of the concatenated tensors, as a 1-D tensor."""
    parts = []
    for tensor in tensors:
        if begin < tensor.numel() and end > 0:
            parts.append(tensor.flatten()[max(begin, 0) : end])
        begin, end = begin - tensor.numel(), end - tensor.numel()
    return torch.cat(parts)
