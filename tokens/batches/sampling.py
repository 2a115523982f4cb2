"""Sampling: which tokens each rank reads in each micro-step, computed with integer arithmetic and without state.

A token stream is cut into windows of T + 1 tokens that begin every T tokens. The first T tokens of a window are inputs,
and the last T are targets. A sample is one window. Step s takes samples s * G .. (s + 1) * G - 1 of the run, where G is
the global batch. Each micro-batch of the step takes B of them, and a rank takes consecutive micro-batches
(`rank_shares`), so a rank owns a contiguous part of the step's samples, whatever the data-parallel size is. With a
single stream, sample n reads the window at position n of the stream's `WindowOrder`. With several streams,
tokens/batches/mixture.py gives each sample a stream and a position in that stream's order.
"""

import functools

import attrs
import numpy as np

from tokens.format.header import WEIGHT
from tokens.format.token_file import TokenStream

FEISTEL_ROUNDS = 6
WORD = 1 << 64
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # multipliers of SplitMix64's finalizer


@attrs.frozen(kw_only=True)
class Layout:
    """How a global batch is divided among data-parallel ranks and micro-steps."""

    context_length: int  # T, tokens
    microbatch_size: int  # B, sequences
    microbatches: int  # micro-batches of one step, on all ranks together
    data_parallel_size: int

    @property
    def global_batch_size(self) -> int:
        """Sequences of one step, on all ranks together."""
        return self.microbatch_size * self.microbatches

    @property
    def accumulation(self) -> int:
        """Micro-steps of each rank in one step. A rank with fewer micro-batches than another has idle micro-steps."""
        return longest_share(self.microbatches, self.data_parallel_size)

    @property
    def even(self) -> bool:
        """True if no rank has idle micro-steps."""
        return self.microbatches % self.data_parallel_size == 0


@functools.cache
def rank_shares(microbatches: int, ranks: int) -> tuple[range, ...]:
    """Return the micro-batches of each rank: at least one, and at most microbatches / ranks, rounded up.

    Within these bounds, a share ends where a large subtree of the gradient sum ends (training/parallel/sum_tree.py), so
    that a rank sends few partial sums: one for each subtree.
    """
    assert 1 <= ranks <= microbatches, (ranks, microbatches)
    longest, odd = longest_share(microbatches, ranks), odd_factor(microbatches)
    shares, begin = [], 0
    for following in reversed(range(ranks)):  # ranks after this one
        first = max(begin + 1, microbatches - longest * following)
        last = min(begin + longest, microbatches - following)
        end = _subtree_boundary(first, last, odd)
        shares.append(range(begin, end))
        begin = end
    return tuple(shares)


def longest_share(microbatches: int, ranks: int) -> int:
    """Return the number of micro-batches of the rank that has the most."""
    return -(-microbatches // ranks)


def balance(microbatches: int, ranks: int) -> float:
    """Return the mean utilization of the ranks until the busiest rank has finished its micro-batches."""
    return microbatches / (longest_share(microbatches, ranks) * ranks)


def odd_factor(count: int) -> int:
    """Return the largest odd divisor of `count`.

    In a sum tree with `count` leaves, the leaves in each group of this size are added in order. The sums of the groups
    are then added pairwise.
    """
    return count // (count & -count)


def idle_micro_steps(layout: Layout, rank: int) -> int:
    """Return the number of idle micro-steps at the start of a rank's step; they add nothing to the gradient."""
    return layout.accumulation - len(rank_shares(layout.microbatches, layout.data_parallel_size)[rank])


def microbatch_index(layout: Layout, micro_step: int, rank: int) -> int:
    """Return the index of a micro-batch in its step, 0 .. microbatches - 1.

    In its idle micro-steps, a rank repeats its first micro-batch.
    """
    share = rank_shares(layout.microbatches, layout.data_parallel_size)[rank]
    return share[max(0, micro_step - idle_micro_steps(layout, rank))]


def rank_samples(layout: Layout, first_step: int, steps: int, rank: int) -> np.ndarray:
    """Return the samples that a data-parallel rank takes in the given steps, int64 (steps, accumulation, B)."""
    indexes = [microbatch_index(layout, micro_step, rank) for micro_step in range(layout.accumulation)]
    firsts = np.arange(first_step, first_step + steps)[:, None] * layout.microbatches + indexes
    return firsts[..., None] * layout.microbatch_size + np.arange(layout.microbatch_size)


def window_count(stream_length: int, start: int, context_length: int) -> int:
    """Return the number of windows in a stream from token `start` on."""
    return max(0, (stream_length - start - 1) // context_length)


def read_windows(parts: list[tuple[TokenStream, int]], context_length: int) -> np.ndarray:
    """Return the window at each (stream, first token) as an array (B, T + 1) of the streams' common type."""
    rows = np.empty((len(parts), context_length + 1), np.result_type(*{stream.dtype for stream, _ in parts}))
    for row, (stream, first) in zip(rows, parts, strict=True):
        if stream.dtype == rows.dtype:
            stream.read_into(row, first)
        else:
            row[:] = stream.read(first, context_length + 1)
    return rows


def read_target_weights(parts: list[tuple[TokenStream, int]], context_length: int) -> np.ndarray:
    """Return the weights of the targets of windows, uint8 (B, T). Each token except a window's first is a target."""
    rows = np.empty((len(parts), context_length), WEIGHT)
    for row, (stream, first) in zip(rows, parts, strict=True):
        stream.read_weights_into(row, first + 1)
    return rows


@attrs.frozen(kw_only=True)
class WindowOrder:
    """The order in which a stream's windows are read: as in the stream, or in a new permutation in each epoch.

    If `era` is not None, the stream is divided into eras of `era` consecutive windows, and windows are permuted only
    within their era. To read a window, the stream is then needed only up to the end of the window's era.
    """

    count: int  # windows of one epoch
    shuffle: bool
    seed: int
    era: int | None = None  # windows
    source: int = 0  # index of the stream in a mixture; each stream has its own permutations

    def windows(self, positions: np.ndarray) -> np.ndarray:
        """Return the window (int64) that is read at each of the given positions.

        Positions are counted from 0, over all epochs. Within each epoch, every window has exactly one position. The
        time per position is constant.
        """
        epochs, within = np.divmod(positions, self.count)
        if not self.shuffle:
            return within
        keys = self._keys(epochs)
        if self.era is None:
            return permute(within, self.count, keys)
        eras, within = np.divmod(within, self.era)
        keys = mix(eras.astype(np.uint64), keys)
        windows = np.empty_like(within)
        sizes = np.minimum(self.era, self.count - eras * self.era)  # the last era may be shorter
        for size in np.unique(sizes).tolist():
            of_size = sizes == size
            windows[of_size] = eras[of_size] * self.era + permute(within[of_size], size, keys[of_size])
        return windows

    def needed(self, position: int) -> int:
        """Return how many windows of the stream must exist before a position of the first epoch can be read."""
        if not self.shuffle:
            return position + 1
        return self.count if self.era is None else min(self.count, (position // self.era + 1) * self.era)

    def _keys(self, epochs: np.ndarray) -> np.ndarray:
        """Return the key of each epoch's permutation. In the first epoch of the first stream, the key is the seed."""
        seed = np.array([self.seed % WORD], np.uint64)
        keys = mix(epochs.astype(np.uint64), mix(seed, np.array([self.source], np.uint64)))
        return np.where(epochs + self.source == 0, seed, keys)


def permute(positions: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Permute positions in 0 .. count - 1, and return int64. Each position has a key that selects its permutation.

    The permutation is a Feistel network with a 64-bit key. Keys are passed as arrays because arithmetic with uint64
    arrays wraps around silently, whereas scalars would cause overflow warnings.
    """
    # Cycle walking: the network permutes 0 .. 4^k - 1, so a result outside 0 .. count - 1 is permuted again.
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    windows = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := np.flatnonzero(windows >= count)).size:
        windows[outside] = _feistel(windows[outside], half_bits, keys[outside])
    return windows.astype(np.int64)


def mix(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return 64 well-mixed bits for each value and key: two rounds of SplitMix64's finalizer (Steele et al. 2014)."""
    mixed = values + (keys + np.uint64(1)) * GOLDEN
    for _ in range(2):
        mixed ^= mixed >> np.uint64(30)
        mixed *= MULTIPLIERS[0]
        mixed ^= mixed >> np.uint64(27)
        mixed *= MULTIPLIERS[1]
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _subtree_boundary(first: int, last: int, odd: int) -> int:
    """Return the number in `first` .. `last` that is a multiple of `odd` * 2^k for the largest possible k.

    If the range contains no multiple of `odd`, return `last`.
    """
    step = odd << last.bit_length()
    while step >= odd:
        if (number := last // step * step) >= first:
            return number
        step //= 2
    return last


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> half, values & mask
    for round_number in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mix(right, keys * np.uint64(FEISTEL_ROUNDS) + np.uint64(round_number)) & mask)
    return left << half | right
