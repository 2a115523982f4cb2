"""Runs of tokens of a text that stand verbatim in token streams, as long as they go."""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from tokens.format.token_file import TokenStream
from tokens.search.ngrams import NgramFinder, Ngrams
from tokens.search.overlap import GRAM, NOWHERE
from tokens.search.stream_blocks import common_dtype, in_blocks, locate

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
    for at, (offsets, numbers) in in_blocks(streams, finder.find, n - 1):
        for pairs in _pairs(ngrams, offsets + at, numbers):
            places, starts, lengths = _runs(streams, text, *pairs, n)
            before = longest.copy()
            np.maximum.at(longest, starts, lengths)
            copies[longest > before], first[longest > before] = 0, NOWHERE
            whole = lengths == longest[starts]
            np.add.at(copies, starts[whole], 1)
            np.minimum.at(first, starts[whole], places[whole])
    begins = np.flatnonzero(longest)
    ends = begins + longest[begins]
    outer = begins[ends > np.maximum.accumulate(np.append(0, ends))[:-1]]
    return [VerbatimRun(*map(int, (start, longest[start], first[start], copies[start]))) for start in outer]


def _pairs(ngrams: Ngrams, places: np.ndarray, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield places of n-grams in the streams, ascending, with each start of that n-gram in the text."""
    by_number = np.argsort(ngrams.numbers, kind="stable")
    edges = np.searchsorted(ngrams.numbers[by_number], np.arange(ngrams.count + 1))
    counts = np.diff(edges)[numbers]
    before = np.cumsum(counts) - counts
    for part in np.split(np.arange(len(places)), np.flatnonzero(np.diff(before // PAIRS_AT_ONCE)) + 1):
        held = counts[part]
        within = np.arange(held.sum()) - np.repeat(np.cumsum(held) - held, held)
        yield np.repeat(places[part], held), ngrams.starts[by_number[np.repeat(edges[numbers[part]], held) + within]]


def _runs(
    streams: Sequence[TokenStream], text: np.ndarray, places: np.ndarray, starts: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join pairs that follow each other; return place, start and length of the runs that begin among the pairs."""
    if not len(places):
        return places, starts, starts
    border = places[0], places[-1]
    order = np.lexsort((places, places - starts))
    places, starts = places[order], starts[order]
    begins = np.flatnonzero((np.diff(places, prepend=-2) != 1) | (np.diff(starts, prepend=-2) != 1))
    lengths = np.diff(begins, append=len(places)) + n - 1
    places, starts = places[begins], starts[begins]
    whole = np.ones(len(places), bool)
    for run in np.flatnonzero((places == border[0]) & (starts > 0)).tolist():
        stream, at = locate(streams, int(places[run]))
        whole[run] = at == 0 or stream.read(at - 1, 1)[0] != text[starts[run] - 1]  # else it began before
    for run in np.flatnonzero(places + lengths - n == border[1]).tolist():
        stream, at = locate(streams, int(places[run]))
        rest, at = text[starts[run] + lengths[run] :], at + int(lengths[run])
        following = stream.read(at, min(len(rest), stream.length - at))
        lengths[run] += np.argmin(np.append(following == rest[: len(following)], False))
    return places[whole], starts[whole], lengths[whole]
