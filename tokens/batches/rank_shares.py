"""Division of a step's micro-batches among data-parallel ranks: contiguous shares, as even as their number allows."""

import functools


@functools.cache
def rank_shares(microbatches: int, ranks: int) -> tuple[range, ...]:
    """Return each rank's micro-batches, at least one and at most microbatches / ranks, rounded up.

    Between these bounds a share ends where a large subtree of the gradients' sum does (training/parallel/sum_tree.py),
    because a rank sends one partial sum a subtree.
    """
    assert 1 <= ranks <= microbatches, (ranks, microbatches)
    most, odd = longest_share(microbatches, ranks), odd_factor(microbatches)
    shares, begin = [], 0
    for following in reversed(range(ranks)):  # ranks after this one
        first = max(begin + 1, microbatches - most * following)
        last = min(begin + most, microbatches - following)
        end = _roundest(first, last, odd)
        shares.append(range(begin, end))
        begin = end
    return tuple(shares)


def longest_share(microbatches: int, ranks: int) -> int:
    """Return the most micro-batches of a rank."""
    return -(-microbatches // ranks)


def balance(microbatches: int, ranks: int) -> float:
    """Return the part of their time in which ranks have a micro-batch, while the one with the most works."""
    return microbatches / (longest_share(microbatches, ranks) * ranks)


def odd_factor(count: int) -> int:
    """Return the largest odd divisor: the leaves to add in order before the pairwise tree begins."""
    return count // (count & -count)


def _roundest(first: int, last: int, odd: int) -> int:
    """Return the number from `first` to `last` that is a multiple of the largest odd x 2^k; the last where none is."""
    step = odd << last.bit_length()
    while step >= odd:
        if (number := last // step * step) >= first:
            return number
        step //= 2
    return last
