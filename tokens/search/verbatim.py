"""Runs of tokens of a text that stand verbatim in token streams, as long as they go."""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from tokens.format.token_file import TokenStream
from tokens.search import stream_blocks
from tokens.search.ngrams import NgramFinder, Ngrams
from tokens.search.overlap import GRAM, NOWHERE
from tokens.search.stream_blocks import common_dtype, in_blocks

PAIRS_AT_ONCE = 1 << 22  # of a place in the streams and one in the text, looked at together


@attrs.frozen
class VerbatimRun:
    """Tokens of a text that stand in the streams, and in no longer run that does."""

    start: int  # in the text
    length: int  # tokens
    place: int  # of the first copy, among the tokens of all streams
    copies: int


def verbatim_runs(streams: Sequence[TokenStream], text: np.ndarray, n: int = GRAM) -> list[VerbatimRun]:
    """Return the runs of n tokens or more of a text (1-D) that none of them holds, in order. Raises as `in_blocks`."""
    ngrams = Ngrams([text], n, common_dtype(streams))
    finder = NgramFinder(ngrams)
    longest, copies, first = np.zeros(len(text), np.int64), np.zeros(len(text), np.int64), np.full(len(text), NOWHERE)
    begin = 0  # of the stream, among the tokens of all
    for stream in streams:
        # A run that begins with a block may have begun before it: it is that of the block before, which holds it all.
        for at, (offsets, numbers) in in_blocks([stream], finder.find, max(n, len(text))):
            for pairs in _pairs(ngrams, offsets, numbers):
                places, starts, lengths = _runs(*pairs, n)
                own = (places <= stream_blocks.SEARCHED_TOKENS) & ((places > 0) | (at == 0))
                places, starts, lengths = places[own] + at + begin, starts[own], lengths[own]
                before = longest.copy()
                np.maximum.at(longest, starts, lengths)
                copies[longest > before], first[longest > before] = 0, NOWHERE
                whole = lengths == longest[starts]
                np.add.at(copies, starts[whole], 1)
                np.minimum.at(first, starts[whole], places[whole])
        begin += stream.length
    begins = np.flatnonzero(longest)
    ends = begins + longest[begins]
    outer = begins[ends > np.maximum.accumulate(np.append(0, ends))[:-1]]
    return [VerbatimRun(*map(int, (start, longest[start], first[start], copies[start]))) for start in outer]


def _pairs(ngrams: Ngrams, places: np.ndarray, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield places of n-grams, ascending, with each start of that n-gram in the text; no run is in two parts."""
    by_number = np.argsort(ngrams.numbers, kind="stable")
    edges = np.searchsorted(ngrams.numbers[by_number], np.arange(ngrams.count + 1))
    counts = np.diff(edges)[numbers]
    gaps = np.flatnonzero(np.diff(places) > 1) + 1
    cuts = gaps[np.diff(np.cumsum(counts)[gaps - 1] // PAIRS_AT_ONCE, prepend=0) > 0]
    for part in np.split(np.arange(len(places)), cuts):
        held = counts[part]
        within = np.arange(held.sum()) - np.repeat(np.cumsum(held) - held, held)
        yield np.repeat(places[part], held), ngrams.starts[by_number[np.repeat(edges[numbers[part]], held) + within]]


def _runs(places: np.ndarray, starts: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join pairs that follow each other; return place, start and length of each run."""
    order = np.lexsort((places, places - starts))
    places, starts = places[order], starts[order]
    begins = np.flatnonzero((np.diff(places, prepend=-2) != 1) | (np.diff(starts, prepend=-2) != 1))
    return places[begins], starts[begins], np.diff(begins, append=len(places)) + n - 1
