"""Which tokens go to step, micro-step and rank: arithmetic on whole numbers, no state.

The stream is cut into windows of T + 1 tokens that begin every T tokens: inputs are the first T, targets the last T.
Step s takes windows s * G .. (s + 1) * G - 1 of the order, G the global batch. Within a step, micro-batch
`rank * accumulation + micro_step` takes M of them, so a rank owns a contiguous run, whatever the world size.
"""

import attrs
import numpy as np
import torch
from torch import Tensor

from tokens.token_file import TokenStream

FEISTEL_ROUNDS = 6


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


def microbatch_places(layout: Layout, step: int, micro_step: int, rank: int) -> range:
    """Return the places in the order of windows that one micro-batch takes."""
    index = microbatch_index(layout, micro_step, rank)
    first = step * layout.global_batch_size + index * layout.microbatch_size
    return range(first, first + layout.microbatch_size)


def window_count(stream_length: int, start: int, context_length: int) -> int:
    """Return how many windows lie in a stream from token `start` on."""
    return max(0, (stream_length - start - 1) // context_length)


@attrs.frozen(kw_only=True)
class WindowOrder:
    """The order in which windows are read: as they lie in the stream, or permuted by a seed."""

    count: int  # windows of one pass
    shuffle: bool
    seed: int

    def window(self, place: int) -> int:
        """Return the window read at `place`, 0 <= place < count. A bijection; O(1) in time and memory."""
        assert 0 <= place < self.count, (place, self.count)
        if not self.shuffle:
            return place
        # A Feistel network permutes 0 .. 4^k - 1; places that leave 0 .. count - 1 are sent on until they return.
        half_bits = max(1, ((self.count - 1).bit_length() + 1) // 2)
        while True:
            place = _feistel(place, half_bits, self.seed)
            if place < self.count:
                return place


def read_windows(stream: TokenStream, start: int, windows: list[int], context_length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (B, T) int64 each, of the given windows of the stream from token `start` on."""
    tokens = np.empty((len(windows), context_length + 1), np.int64)
    for row, window in enumerate(windows):
        tokens[row] = stream.read(start + window * context_length, context_length + 1)
    rows = torch.from_numpy(tokens)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _feistel(value: int, half_bits: int, seed: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (_mix(right, seed * FEISTEL_ROUNDS + round_number) & mask)
    return left << half_bits | right


def _mix(value: int, key: int) -> int:
    """Return 64 well-mixed bits of value and key: two rounds of the SplitMix64 finalizer (Steele et al. 2014)."""
    word = 1 << 64
    mixed = (value + (key + 1) * 0x9E3779B97F4A7C15) % word
    for _ in range(2):
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % word
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % word
        mixed ^= mixed >> 31
    return mixed
