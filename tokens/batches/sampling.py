"""Sampling: the tokens of a step, micro-step and data-parallel rank, by arithmetic on integers, without state.

A token stream is cut into windows of T + 1 tokens that begin every T tokens: inputs are the first T, targets the last
T. A sample is one window. Step s takes samples s * G .. (s + 1) * G - 1 of the run, G the global batch. Each of its
micro-batches takes B of them, and a rank takes consecutive micro-batches (`rank_shares`), so it owns a contiguous part
of the step's samples, whatever the data-parallel size. With one stream, sample n reads the window at place n of the
stream's `WindowOrder`; of several streams, tokens/batches/mixture.py gives each sample a stream and a place in that
stream's order.
"""

import functools

import attrs
import numpy as np

from tokens.format.header import WEIGHT
from tokens.format.token_file import TokenStream

FEISTEL_ROUNDS = 6
WORD = 1 << 64
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # and those of its finalizer


@attrs.frozen(kw_only=True)
class Layout:
    """Partition of a global batch over data-parallel ranks and micro-steps."""

    context_length: int  # T, tokens
    microbatch_size: int  # B, sequences
    microbatches: int  # of one step, all ranks
    data_parallel_size: int

    @property
    def global_batch_size(self) -> int:
        """Sequences of one step, all ranks."""
        return self.microbatch_size * self.microbatches

    @property
    def accumulation(self) -> int:
        """Micro-steps that each rank takes for one step; idle ones where it has fewer micro-batches than another."""
        return longest_share(self.microbatches, self.data_parallel_size)

    @property
    def even(self) -> bool:
        """True if no rank has idle micro-steps."""
        return self.microbatches % self.data_parallel_size == 0


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


def idle_micro_steps(layout: Layout, rank: int) -> int:
    """Return how many of a rank's micro-steps, the first ones of a step, count for nothing."""
    return layout.accumulation - len(rank_shares(layout.microbatches, layout.data_parallel_size)[rank])


def microbatch_index(layout: Layout, micro_step: int, rank: int) -> int:
    """Return the micro-batch's place in its step, 0 .. microbatches - 1; in an idle micro-step the rank's first."""
    share = rank_shares(layout.microbatches, layout.data_parallel_size)[rank]
    return share[max(0, micro_step - idle_micro_steps(layout, rank))]


def rank_samples(layout: Layout, first_step: int, steps: int, rank: int) -> np.ndarray:
    """Return the samples of the run that a data-parallel rank takes in some steps: (steps, accumulation, B) int64."""
    indexes = [microbatch_index(layout, micro_step, rank) for micro_step in range(layout.accumulation)]
    firsts = np.arange(first_step, first_step + steps)[:, None] * layout.microbatches + indexes
    return firsts[..., None] * layout.microbatch_size + np.arange(layout.microbatch_size)


def window_count(stream_length: int, start: int, context_length: int) -> int:
    """Return the number of windows in a stream from token `start` on."""
    return max(0, (stream_length - start - 1) // context_length)


def read_windows(parts: list[tuple[TokenStream, int]], context_length: int) -> np.ndarray:
    """Return a window for each (stream, first token), (B, T + 1) in the streams' type."""
    rows = np.empty((len(parts), context_length + 1), np.result_type(*{stream.dtype for stream, _ in parts}))
    for row, (stream, first) in zip(rows, parts, strict=True):
        if stream.dtype == rows.dtype:
            stream.read_into(row, first)
        else:
            row[:] = stream.read(first, context_length + 1)
    return rows


def read_target_weights(parts: list[tuple[TokenStream, int]], context_length: int) -> np.ndarray:
    """Return the weight of each target of windows, uint8 (B, T): of the tokens after the first."""
    rows = np.empty((len(parts), context_length), WEIGHT)
    for row, (stream, first) in zip(rows, parts, strict=True):
        stream.read_weights_into(row, first + 1)
    return rows


@attrs.frozen(kw_only=True)
class WindowOrder:
    """Read order of a stream's windows: that of the stream, or another permutation in each epoch.

    With eras, windows are permuted inside each era of so many: reading needs the stream only up to the era's end.
    """

    count: int  # windows of one epoch
    shuffle: bool
    seed: int
    era: int | None = None  # windows
    source: int = 0  # the stream's place in a mixture: each has permutations of its own

    def windows(self, places: np.ndarray) -> np.ndarray:
        """Return the windows read at some places 0, 1, 2 ..., int64: a bijection in each epoch, O(1) a place."""
        epochs, within = np.divmod(places, self.count)
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
            same = sizes == size
            windows[same] = eras[same] * self.era + permute(within[same], size, keys[same])
        return windows

    def needed(self, place: int) -> int:
        """Return how many windows of the stream must exist before a place of the first epoch can be read."""
        if not self.shuffle:
            return place + 1
        return self.count if self.era is None else min(self.count, (place // self.era + 1) * self.era)

    def _keys(self, epochs: np.ndarray) -> np.ndarray:
        """Return the key of each epoch's permutation; of the first epoch of a run's first stream it is the seed."""
        seed = np.array([self.seed % WORD], np.uint64)
        keys = mix(epochs.astype(np.uint64), mix(seed, np.array([self.source], np.uint64)))
        return np.where(epochs + self.source == 0, seed, keys)


def permute(places: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Return the image of each place 0 .. count - 1 under the pseudo-random permutation of its key, int64.

    A Feistel network keyed by 64 bits. Keys are arrays: uint64 arrays wrap around silently, single numbers would warn.
    """
    # Cycle walking: a Feistel network permutes 0 .. 4^k - 1; a place outside 0 .. count - 1 is permuted again.
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    windows = _feistel(places.astype(np.uint64), half_bits, keys)
    while (outside := np.flatnonzero(windows >= count)).size:
        windows[outside] = _feistel(windows[outside], half_bits, keys[outside])
    return windows.astype(np.int64)


def mix(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return 64 well-mixed bits of each value and key: two rounds of SplitMix64's finalizer (Steele et al. 2014)."""
    mixed = values + (keys + np.uint64(1)) * GOLDEN
    for _ in range(2):
        mixed ^= mixed >> np.uint64(30)
        mixed *= MULTIPLIERS[0]
        mixed ^= mixed >> np.uint64(27)
        mixed *= MULTIPLIERS[1]
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _roundest(first: int, last: int, odd: int) -> int:
    """Return the number from `first` to `last` that is a multiple of the largest odd x 2^k; the last where none is."""
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
