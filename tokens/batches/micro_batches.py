"""One rank's micro-batches, one after the other, from any step on: the windows that its samples stand for.

Of token files that are still being written, a step's windows are known as soon as what they depend on is committed:
they are those of the finished files.
"""

from collections.abc import Callable, Iterator

import attrs
import numpy as np
from torch import Tensor

from common.errors import BadInput
from tokens.batches.mixture import Mixture
from tokens.batches.sampling import Layout, WindowOrder, inputs_and_targets, rank_samples, read_windows, window_count
from tokens.format.token_file import TokenStream
from tokens.prepare.growing_tokens import GrowingTokens

SAMPLES_AHEAD = 4096  # whose windows are computed in one go: numpy's cost a call is spread over them


@attrs.frozen(kw_only=True)
class TokenSource:
    """A stream and how it is read."""

    stream: TokenStream
    start_token: int
    order: WindowOrder  # of growing tokens: as if they never ended
    max_epochs: int = 1
    growing: GrowingTokens | None = None


@attrs.frozen(kw_only=True)
class Reading:
    """What all ranks read of a run."""

    sources: tuple[TokenSource, ...]
    mixture: Mixture
    layout: Layout
    vocabulary_size: int

    @property
    def grows(self) -> bool:
        """True when token files were still being written at the run's start."""
        return any(source.growing is not None for source in self.sources)


def micro_batches(
    reading: Reading, rank: int, first_step: int, end_step: int, wait_for: Callable[[int], None] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets), (B, T) int64 each, of a rank's micro-steps in steps first_step .. end_step - 1.

    `wait_for` is called before a step of growing tokens is read, and returns when that is `ready`. Raises BadInput for
    an id that is not below the vocabulary size.
    """
    layout = reading.layout
    ahead = max(1, SAMPLES_AHEAD // (layout.accumulation * layout.microbatch_size))  # steps
    if reading.grows:
        ahead = 1
    for first in range(first_step, end_step, ahead):
        if reading.grows and wait_for is not None:
            wait_for(first)
        samples = rank_samples(layout, first, min(ahead, end_step - first), rank)
        sources, tokens = locate(reading, samples.ravel())
        streams = [reading.sources[source].stream for source in sources.tolist()]
        parts_ahead = list(zip(streams, tokens.tolist(), strict=True))
        for index, begin in enumerate(range(0, len(parts_ahead), layout.microbatch_size)):
            parts = parts_ahead[begin : begin + layout.microbatch_size]
            rows = read_windows(parts, layout.context_length)
            if rows.max() >= reading.vocabulary_size:
                step = first + index // layout.accumulation
                raise BadInput(f"step {step + 1}: {_find_bad_id(reading, parts)}", alone=True)
            yield inputs_and_targets(rows)


def locate(reading: Reading, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each sample of the run, and the token of its stream at which the sample's window begins."""
    sources, places = reading.mixture.find(samples)
    tokens = np.empty_like(places)
    for number, source in enumerate(reading.sources):
        here = sources == number
        windows = _order(source, reading.layout).windows(places[here])
        tokens[here] = source.start_token + windows * reading.layout.context_length
    return sources, tokens


def ready(reading: Reading, step: int) -> bool:
    """Tell whether all that a step reads, on any rank, is there. Raises BadInput when it will never be."""
    layout = reading.layout
    first = step * layout.global_batch_size
    sources, places = reading.mixture.find(np.arange(first, first + layout.global_batch_size))
    return all(
        _is_there(source, int(places[sources == number].max()), layout)
        for number, source in enumerate(reading.sources)
        if source.growing is not None and (sources == number).any()
    )


def _is_there(source: TokenSource, place: int, layout: Layout) -> bool:
    growing = source.growing
    assert growing is not None
    if not growing.finished:
        tokens = source.start_token + source.order.needed(place) * layout.context_length + 1
        if growing.committed("train") >= tokens:
            return True
        growing.refresh()
        if not growing.finished:
            return growing.committed("train") >= tokens
    windows = _order(source, layout).count
    if place >= windows * source.max_epochs:
        raise BadInput(
            f"{growing.directory}: ended with {windows:,} windows of {layout.context_length} tokens, but the run wants "
            f"more than {source.max_epochs} epoch{'s' * (source.max_epochs > 1)} of them; lower min_train_tokens, or "
            "raise max_epochs",
            alone=True,
        )
    return True


def _order(source: TokenSource, layout: Layout) -> WindowOrder:
    """Return a source's order, now that its length is known, or as long as it is not."""
    if source.growing is None or not source.growing.finished:
        return source.order
    count = window_count(source.growing.committed("train"), source.start_token, layout.context_length)
    return attrs.evolve(source.order, count=count)


def _find_bad_id(reading: Reading, parts: list[tuple[TokenStream, int]]) -> str:
    try:
        for stream, first in parts:
            stream.check_ids(first, reading.layout.context_length + 1, reading.vocabulary_size)
    except BadInput as error:
        return str(error)
    return "the token files changed while they were read"
