"""Which tokens go to step, micro-step and rank: arithmetic on whole numbers, no state.

A stream is cut into windows of T + 1 tokens that begin every T tokens: inputs are the first T, targets the last T. Step
s takes samples s * G .. (s + 1) * G - 1 of the run, G the global batch. Within a step, micro-batch
`rank * accumulation + micro_step` takes M of them, so a rank owns a contiguous run, whatever the world size. A sample
is a window: tokens/batches/mixture.py says of which source, and at which place among those of its source, and the
source's `WindowOrder` which of its windows is read there.
"""

import attrs
import numpy as np
import torch
from torch import Tensor

from tokens.format.token_file import TokenStream

FEISTEL_ROUNDS = 6
WORD = 1 << 64
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # and those of its finalizer


@attrs.frozen(kw_only=True)
class Layout:
    """How a global batch is spread over ranks and micro-steps."""

    context_length: int  # T, tokens
    microbatch_size: int  # M, sequences
    accumulation: int  # micro-steps a rank takes for one step
    world_size: int

    @property
    def global_batch_size(self) -> int:
        """Sequences of one step, all ranks."""
        return self.microbatch_size * self.accumulation * self.world_size


def microbatch_index(layout: Layout, micro_step: int, rank: int) -> int:
    """Return the micro-batch's place in its step, 0 .. accumulation * world_size - 1."""
    return rank * layout.accumulation + micro_step


def rank_samples(layout: Layout, first_step: int, steps: int, rank: int) -> np.ndarray:
    """Return the samples of the run that a rank takes in some steps: (steps, accumulation, M) int64."""
    first = microbatch_index(layout, 0, rank) * layout.microbatch_size
    own = np.arange(first, first + layout.accumulation * layout.microbatch_size)
    beginnings = np.arange(first_step, first_step + steps) * layout.global_batch_size
    return (beginnings[:, None] + own).reshape(steps, layout.accumulation, layout.microbatch_size)


def window_count(stream_length: int, start: int, context_length: int) -> int:
    """Return how many windows lie in a stream from token `start` on."""
    return max(0, (stream_length - start - 1) // context_length)


@attrs.frozen(kw_only=True)
class WindowOrder:
    """The order in which a source's windows are read: as they lie in the stream, or permuted anew in each epoch.

    With eras, windows are permuted inside each era of so many: what a place stands for is then known as soon as its era
    is there, and need not wait for the end of the stream.
    """

    count: int  # windows of one epoch
    shuffle: bool
    seed: int
    era: int | None = None  # windows
    source: int = 0  # the source's place in a mixture: each has permutations of its own

    def windows(self, places: np.ndarray) -> np.ndarray:
        """Return the windows read at some places, 0, 1, 2 and so on: int64.

        A bijection in each epoch; O(1) a place in time and memory.
        """
        epochs, within = np.divmod(places, self.count)
        if not self.shuffle:
            return within
        keys = self._keys(epochs)
        if self.era is None:
            return _permute(within, self.count, keys)
        eras, within = np.divmod(within, self.era)
        keys = _mix(eras.astype(np.uint64), keys)
        windows = np.empty_like(within)
        sizes = np.minimum(self.era, self.count - eras * self.era)  # the last era may be shorter
        for size in np.unique(sizes).tolist():
            same = sizes == size
            windows[same] = eras[same] * self.era + _permute(within[same], size, keys[same])
        return windows

    def needed(self, place: int) -> int:
        """Return how many windows of the stream's first epoch must be there to know what is read at a place."""
        if not self.shuffle:
            return place + 1
        return self.count if self.era is None else min(self.count, (place // self.era + 1) * self.era)

    def _keys(self, epochs: np.ndarray) -> np.ndarray:
        """Return the key of each epoch's permutation; the first one of a run's first source is the run's own seed."""
        seed = np.array([self.seed % WORD], np.uint64)
        keys = _mix(epochs.astype(np.uint64), _mix(seed, np.array([self.source], np.uint64)))
        return np.where(epochs + self.source == 0, seed, keys)


def read_windows(parts: list[tuple[TokenStream, int]], context_length: int) -> np.ndarray:
    """Return windows, (B, T + 1) in the streams' type, of which each part gives the stream and the first token."""
    rows = np.empty((len(parts), context_length + 1), np.result_type(*{stream.dtype for stream, _ in parts}))
    for row, (stream, first) in zip(rows, parts, strict=True):
        if stream.dtype == rows.dtype:
            stream.read_into(row, first)
        else:
            row[:] = stream.read(first, context_length + 1)
    return rows


def inputs_and_targets(rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return what the network is given of windows (B, T + 1), and what it is to say: (B, T) int64 each."""
    return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


# Arrays of uint64, which wrap around silently, from here on; numbers alone would warn.


def _permute(places: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Return where each of the places 0 .. count - 1 is sent by its key's permutation."""
    # A Feistel network permutes 0 .. 4^k - 1; places that leave 0 .. count - 1 are sent on until they return.
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    windows = _feistel(places.astype(np.uint64), half_bits, keys)
    while (outside := np.flatnonzero(windows >= count)).size:
        windows[outside] = _feistel(windows[outside], half_bits, keys[outside])
    return windows.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> half, values & mask
    for round_number in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (_mix(right, keys * np.uint64(FEISTEL_ROUNDS) + np.uint64(round_number)) & mask)
    return left << half | right


def _mix(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return 64 well-mixed bits of each value and key: two rounds of SplitMix64's finalizer (Steele et al. 2014)."""
    mixed = values + (keys + np.uint64(1)) * GOLDEN
    for _ in range(2):
        mixed ^= mixed >> np.uint64(30)
        mixed *= MULTIPLIERS[0]
        mixed ^= mixed >> np.uint64(27)
        mixed *= MULTIPLIERS[1]
        mixed ^= mixed >> np.uint64(31)
    return mixed
