"""The micro-batches (input ids and target ids) of a data-parallel rank, in the order of reading, from any step on.

tokens/batches/sampling.py decides which samples a rank takes, and tokens/batches/mixture.py decides from which streams
they come. While token files are still growing, a window can be read as soon as everything that determines its
position has been committed.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from torch import Tensor

from common.errors import BadInput
from tokens.batches.mixture import Mixture
from tokens.batches.sampling import Layout, WindowOrder, rank_samples, read_target_weights, read_windows, window_count
from tokens.format.token_file import TokenStream

if TYPE_CHECKING:
    from tokens.prepare.growing_tokens import GrowingTokens

SAMPLES_AHEAD = 4096  # samples located in one call, to amortize the overhead of numpy's calls
ENDLESS = 1 << 62  # stands for the number of windows of a stream whose length is not known yet


@attrs.frozen
class MicroBatch:
    """Network inputs and next-token targets. If the targets do not all count the same, each target has a weight."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    weights: Tensor | None = None  # weight of each target, (B, T) fp32
    mean_weight: float = 1.0  # mean over all targets of the global batch, known before its first backward pass

    @classmethod
    def of_windows(cls, rows: np.ndarray, weights: np.ndarray | None = None, mean_weight: float = 1.0) -> "MicroBatch":
        """Return the inputs and targets of windows (B, T + 1). `weights` are the weights of the targets, (B, T)."""
        inputs, targets = (torch.from_numpy(part.astype(np.int64)) for part in (rows[:, :-1], rows[:, 1:]))
        factors = None if weights is None else torch.from_numpy(weights.astype(np.float32))
        return cls(inputs, targets, factors, mean_weight)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Return the micro-batch with `move` applied to each tensor, for example to copy it to a GPU."""
        weights = None if self.weights is None else move(self.weights)
        return MicroBatch(move(self.inputs), move(self.targets), weights, self.mean_weight)


@attrs.frozen(kw_only=True)
class TokenSource:
    """A token stream and the order in which its windows are read."""

    stream: TokenStream
    start_token: int
    order: WindowOrder  # has ENDLESS windows if the files are still growing
    growing: "GrowingTokens | None" = None  # files that were still being written when the run started
    max_epochs: int = 1  # limit for a growing stream

    def first_tokens(self, order_positions: np.ndarray, context_length: int) -> np.ndarray:
        """For each position in the order, return the index (int64) of the first token of its window."""
        return self.start_token + self._order(context_length).windows(order_positions) * context_length

    def ready(self, order_position: int, context_length: int) -> bool:
        """Return whether the window at a position in the order, and all windows before it, can be read.

        Raises BadInput if the window will never exist because the preparation has ended.
        """
        growing = self.growing
        if growing is None:
            return True
        tokens = self.start_token + self.order.needed(order_position) * context_length + 1
        if not growing.finished and growing.committed("train") < tokens:
            growing.refresh()
        if not growing.finished:
            return growing.committed("train") >= tokens
        windows = self._order(context_length).count
        if order_position >= windows * self.max_epochs:
            got = f"{growing.directory}: the preparation ended with {windows:,} windows of {context_length} tokens"
            expected = f"but the run with max_epochs {self.max_epochs} needs more"
            raise BadInput(f"{got}, {expected}; lower min_train_tokens, or raise max_epochs", alone=True)
        return True

    def _order(self, context_length: int) -> WindowOrder:
        if self.growing is None or not self.growing.finished:
            return self.order
        count = window_count(self.growing.committed("train"), self.start_token, context_length)
        return attrs.evolve(self.order, count=count)


@attrs.frozen(kw_only=True)
class Reading:
    """Training data of a run: streams, mixture and the layout of a step. It is the same on every rank."""

    sources: tuple[TokenSource, ...]
    mixture: Mixture
    layout: Layout
    vocabulary_size: int
    weighted: bool = False  # True if the weights in the files apply to the targets; False if all targets count the same

    @property
    def growing(self) -> "list[GrowingTokens]":
        """Token files that were still being written when the run started."""
        return [source.growing for source in self.sources if source.growing is not None]


def micro_batches(
    reading: Reading, rank: int, steps: range, wait_for: Callable[[int], bool] | None = None
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a data-parallel rank for the given steps.

    If the token files are still growing, `wait_for` is called with each step before the step is read. The call returns
    True as soon as the step is `ready`, or False to end the iteration. Raises BadInput for an id outside the
    vocabulary.
    """
    layout, size = reading.layout, reading.layout.microbatch_size
    ahead = 1 if reading.growing else max(1, SAMPLES_AHEAD // (layout.accumulation * size))  # steps
    for first in steps[::ahead]:
        if reading.growing and wait_for is not None and not wait_for(first):
            return
        windows = locate(reading, rank_samples(layout, first, min(ahead, steps.stop - first), rank).ravel())
        mean_weight = 1.0
        for index in range(len(windows) // size):
            step = first + index // layout.accumulation
            if reading.weighted and index % layout.accumulation == 0:
                mean_weight = mean_target_weight(reading, step)
            parts = windows[index * size : (index + 1) * size]
            rows = read_windows(parts, layout.context_length)
            if rows.max() >= reading.vocabulary_size:
                row, column = np.argwhere(rows >= reading.vocabulary_size)[0].tolist()
                stream, token = parts[row]
                problem = stream.bad_id(token + column, rows[row, column], reading.vocabulary_size)
                raise BadInput(f"step {step + 1}: {problem}", alone=True)
            weights = read_target_weights(parts, layout.context_length) if reading.weighted else None
            yield MicroBatch.of_windows(rows, weights, mean_weight)


def mean_target_weight(reading: Reading, step: int) -> float:
    """Return the mean weight of all targets of a step on all ranks, or 1.0 if no target counts.

    Every rank computes this mean from the files, without a collective.
    """
    batch = reading.layout.global_batch_size
    windows = locate(reading, np.arange(step * batch, (step + 1) * batch))
    weights = read_target_weights(windows, reading.layout.context_length)
    return int(weights.sum(dtype=np.int64)) / weights.size or 1.0


def locate(reading: Reading, samples: np.ndarray) -> list[tuple[TokenStream, int]]:
    """Return the stream of each sample, and the first token of the sample's window."""
    numbers, order_positions = reading.mixture.find(samples)  # a single stream is a mixture with one source
    tokens = np.empty_like(order_positions)
    for number, source in enumerate(reading.sources):
        from_source = numbers == number
        tokens[from_source] = source.first_tokens(order_positions[from_source], reading.layout.context_length)
    streams = [source.stream for source in reading.sources]
    return [(streams[number], token) for number, token in zip(numbers.tolist(), tokens.tolist(), strict=True)]


def ready(reading: Reading, step: int) -> bool:
    """Return whether every window of a step, on any rank, has been written.

    Raises BadInput if a window will never be written.
    """
    first, size = step * reading.layout.global_batch_size, reading.layout.global_batch_size
    numbers, order_positions = reading.mixture.find(np.arange(first, first + size))
    return all(
        source.ready(int(order_positions[numbers == number].max()), reading.layout.context_length)
        for number, source in enumerate(reading.sources)
        if (numbers == number).any()
    )
