"""One rank's micro-batches, one after the other, from any step on: the windows that its samples stand for."""

from collections.abc import Iterator

import attrs
import numpy as np
from torch import Tensor

from errors import BadInput
from tokens.batches import Layout, WindowOrder, inputs_and_targets, rank_samples, read_windows
from tokens.mixture import Mixture
from tokens.token_file import TokenStream

SAMPLES_AHEAD = 4096  # whose windows are computed in one go: numpy's cost a call is spread over them


@attrs.frozen(kw_only=True)
class Source:
    """A stream and how it is read."""

    stream: TokenStream
    start_token: int
    order: WindowOrder


@attrs.frozen(kw_only=True)
class Reading:
    """What all ranks read of a run."""

    sources: tuple[Source, ...]
    mixture: Mixture
    layout: Layout
    vocabulary_size: int


def micro_batches(reading: Reading, rank: int, first_step: int, end_step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets), (B, T) int64 each, of a rank's micro-steps in steps first_step .. end_step - 1.

    Raises BadInput for an id that is not below the vocabulary size.
    """
    layout = reading.layout
    ahead = max(1, SAMPLES_AHEAD // (layout.accumulation * layout.microbatch_size))  # steps
    for first in range(first_step, end_step, ahead):
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
        tokens[here] = source.start_token + source.order.windows(places[here]) * reading.layout.context_length
    return sources, tokens


def _find_bad_id(reading: Reading, parts: list[tuple[TokenStream, int]]) -> str:
    try:
        for stream, first in parts:
            stream.check_ids(first, reading.layout.context_length + 1, reading.vocabulary_size)
    except BadInput as error:
        return str(error)
    return "the token files changed while they were read"
