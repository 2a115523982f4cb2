"""The longest runs of a text's tokens that occur verbatim in token streams."""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from tokens.format.token_file import TokenStream
from tokens.search import stream_blocks
from tokens.search.ngrams import NgramFinder, Ngrams
from tokens.search.overlap import GRAM, NOWHERE
from tokens.search.stream_blocks import common_dtype, in_blocks

PAIRS_AT_ONCE = 1 << 22  # maximum number of (place in the streams, place in the text) pairs processed at once


@attrs.frozen
class VerbatimRun:
    """A run of a text's tokens that occurs in the streams, and that is not part of a longer such run."""

    start: int  # position of the first token in the text
    length: int  # tokens
    place: int  # where the first copy begins in the concatenation of all streams
    copies: int


def verbatim_runs(streams: Sequence[TokenStream], text: np.ndarray, n: int = GRAM) -> list[VerbatimRun]:
    """Return the runs of at least n tokens that a text (1-D) shares with the streams, in the order of the text.

    A run that is inside a longer run is left out. Raises BadInput like `in_blocks`.
    """
    ngrams = Ngrams([text], n, common_dtype(streams))
    finder = NgramFinder(ngrams)
    longest, copies, first = np.zeros(len(text), np.int64), np.zeros(len(text), np.int64), np.full(len(text), NOWHERE)
    begin = 0  # position of the stream's first token in the concatenation of all streams
    for stream in streams:
        # A run at the very start of a block may have begun in the previous block, which contains and counts all of it.
        for at, (offsets, numbers) in in_blocks([stream], finder.find, max(n, len(text))):
            for pairs in _pairs(ngrams, offsets, numbers):
                places, starts, lengths = _runs(*pairs, n)
                begins_here = (places <= stream_blocks.SEARCHED_TOKENS) & ((places > 0) | (at == 0))
                places, starts, lengths = places[begins_here] + at + begin, starts[begins_here], lengths[begins_here]
                before = longest.copy()
                np.maximum.at(longest, starts, lengths)
                copies[longest > before], first[longest > before] = 0, NOWHERE
                is_longest = lengths == longest[starts]
                np.add.at(copies, starts[is_longest], 1)
                np.minimum.at(first, starts[is_longest], places[is_longest])
        begin += stream.length
    begins = np.flatnonzero(longest)
    ends = begins + longest[begins]
    outer = begins[ends > np.maximum.accumulate(np.append(0, ends))[:-1]]
    return [VerbatimRun(*map(int, (start, longest[start], first[start], copies[start]))) for start in outer]


def _pairs(ngrams: Ngrams, places: np.ndarray, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of arrays: ascending places in a block, and positions in the text where the same n-grams begin.

    A run is never divided between two of the yielded parts.
    """
    by_number = np.argsort(ngrams.numbers, kind="stable")
    edges = np.searchsorted(ngrams.numbers[by_number], np.arange(ngrams.count + 1))
    counts = np.diff(edges)[numbers]
    gaps = np.flatnonzero(np.diff(places) > 1) + 1
    cuts = gaps[np.diff(np.cumsum(counts)[gaps - 1] // PAIRS_AT_ONCE, prepend=0) > 0]
    for part in np.split(np.arange(len(places)), cuts):
        matches = counts[part]
        within = np.arange(matches.sum()) - np.repeat(np.cumsum(matches) - matches, matches)
        yield (
            np.repeat(places[part], matches),
            ngrams.starts[by_number[np.repeat(edges[numbers[part]], matches) + within]],
        )


def _runs(places: np.ndarray, starts: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join pairs into runs in which place and start increase by one. Return each run's place, start and length."""
    order = np.lexsort((places, places - starts))
    places, starts = places[order], starts[order]
    begins = np.flatnonzero((np.diff(places, prepend=-2) != 1) | (np.diff(starts, prepend=-2) != 1))
    return places[begins], starts[begins], np.diff(begins, append=len(places)) + n - 1
