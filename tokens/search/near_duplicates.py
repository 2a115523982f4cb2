"""Near-duplicate documents: MinHash of their n-grams, bands of hashes, exact Jaccard similarity of the candidates.

The least of a random hash over the n-grams is equal in two documents with probability s, the share of their distinct
n-grams that both hold (Broder, "On the resemblance and containment of documents", 1997). Documents equal in all ROWS
hashes of one of BANDS bands become candidates: 1 - (1 - s^ROWS)^BANDS of the pairs of similarity s (Leskovec, Rajaraman
and Ullman, "Mining of Massive Datasets", section 3.4).
"""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from tokens.format.token_file import TokenStream
from tokens.search import stream_blocks
from tokens.search.ngrams import Ngrams, hash_columns, mixed, words_of_ngrams
from tokens.search.stream_blocks import common_dtype, in_blocks, locate

SHINGLE = 5  # tokens of an n-gram: of a template, short runs between the words filled in are all that copies share
BANDS, ROWS = 20, 4
SIMILARITY = 0.6  # least of near-duplicates: 94 % of the pairs at it become candidates, 99.997 % at 0.8
KEPT_PAIRS = 5  # kept, to be shown
EMPTY = np.uint32((1 << 32) - 1)  # hash of no n-gram


@attrs.frozen(eq=False)
class NearDuplicates:
    """Documents of streams, empty ones left out, and of each the first one that it is like, directly or by others."""

    starts: np.ndarray  # first token among those of all streams, int64 (documents,), ascending
    lengths: np.ndarray  # tokens, int64 (documents,); with fewer than SHINGLE a document is like none
    like: np.ndarray  # number of a document, its own where it is like no earlier one, int64 (documents,)
    pairs: list[tuple[float, int, int]]  # a few: Jaccard similarity below 1, and the numbers of two documents


def near_duplicates(streams: Sequence[TokenStream], end_of_text_id: int) -> NearDuplicates:
    """Compare all documents of streams. Memory: some 250 bytes a document. Raises BadInput as `in_blocks`.

    A document is compared with the first and the previous one of those that share a band with it.
    """
    parts = list(_signatures(streams, end_of_text_id))
    starts, lengths = (np.concatenate([np.zeros(0, np.int64), *(part[k] for part in parts)]) for k in (0, 1))
    like = np.arange(len(starts))
    pairs: list[tuple[float, int, int]] = []
    long = np.flatnonzero(lengths >= SHINGLE)
    for band in range(BANDS * (len(long) > 0)):
        keys = np.concatenate([part[2][:, band] for part in parts])[long]
        order = np.argsort(keys, kind="stable")
        again = np.diff(keys[order], prepend=keys[order[0]]) == 0
        again[0] = False
        first = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
        here = np.flatnonzero(again)
        for earlier in (first[here], here - 1):
            known, new = long[order[earlier]], long[order[here]]
            apart = _roots(like, known) != _roots(like, new)
            for one, other in zip(known[apart].tolist(), new[apart].tolist(), strict=True):
                roots = _roots(like, np.array([one, other]))
                if roots[0] == roots[1]:
                    continue
                places = [(*locate(streams, int(starts[k])), int(lengths[k])) for k in (one, other)]
                similarity = _similarity([stream.read(at, length) for stream, at, length in places])
                if similarity >= SIMILARITY:
                    like[roots.max()] = roots.min()
                    if similarity < 1 and len(pairs) < KEPT_PAIRS and all(one != pair[1] for pair in pairs):
                        pairs.append((similarity, one, other))
    return NearDuplicates(starts, lengths, _roots(like, like), pairs)


def _signatures(streams: Sequence[TokenStream], end: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield first tokens, lengths, and keys of bands, uint64 (documents, BANDS), of the documents of each block."""
    draw, dtype = np.random.default_rng(0).integers, common_dtype(streams)
    masks, factors = draw(0, 1 << 32, (2, BANDS * ROWS), np.uint32) | np.array([[0], [1]], np.uint32)  # factors are odd

    def least_hashes(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of documents in a block, and the least hashes of the n-grams before and after each."""
        words, ends = words_of_ngrams(block.astype(dtype, copy=False), SHINGLE), np.flatnonzero(block == end)
        whole = np.ones(len(block), bool)  # True where an n-gram without an end begins
        whole[np.maximum(ends[:, None] - np.arange(SHINGLE), 0)] = whole[len(words[0]) :] = False
        places = np.flatnonzero(whole)
        hashes = (mixed(hash_columns(words)) >> np.uint64(32)).astype(np.uint32)[places]
        ends = ends[ends < stream_blocks.SEARCHED_TOKENS]
        edges = np.array([0, *np.searchsorted(places, ends), len(places)])
        filled = np.flatnonzero(np.diff(edges))
        least = np.full((len(ends) + 1, BANDS * ROWS), EMPTY)
        for k in range(BANDS * ROWS if len(filled) else 0):
            least[filled, k] = np.minimum.reduceat((hashes ^ masks[k]) * factors[k], edges[filled])
        return ends, least

    begin = done = 0  # first token of the document; tokens of earlier streams
    for stream in streams:
        rest, done = np.full(BANDS * ROWS, EMPTY), done + stream.length  # of the document that goes on
        for at, (ends, least) in in_blocks([stream], least_hashes, SHINGLE - 1):
            least[0] = np.minimum(least[0], rest)
            rest, closed = least[-1], ends + at + done - stream.length
            if at + stream_blocks.SEARCHED_TOKENS >= stream.length:  # the last document may lack its end of text
                closed = np.append(closed, done)
            starts = np.append(begin, closed + 1)[:-1]
            begin = int(np.append(begin, closed + 1)[-1])
            whole = closed > starts
            bands = np.split(least[: len(closed)][whole], BANDS, axis=1)
            keys = np.stack([hash_columns([*band.T], seed) for seed, band in enumerate(bands)], axis=1)
            yield starts[whole], (closed - starts)[whole], keys
        begin = done


def _similarity(documents: list[np.ndarray]) -> float:
    """Return the Jaccard similarity of two documents' sets of n-grams."""
    ngrams = Ngrams(documents, SHINGLE, np.dtype(np.uint32))
    held = np.zeros((2, ngrams.count), bool)
    held[ngrams.sequences, ngrams.numbers] = True
    return float(held.all(0).sum() / held.any(0).sum())


def _roots(like: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the first document of each one's group."""
    while (like[numbers] != numbers).any():
        numbers = like[numbers]
    return numbers
