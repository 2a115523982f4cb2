"""Near-duplicate documents: MinHash of their n-grams, bands of hashes, and exact Jaccard similarity of the candidates.

With probability s, the smallest random hash of an n-gram is the same in two documents, where s is the share of their
distinct n-grams that both contain (Broder, "On the resemblance and containment of documents", 1997).
Documents that agree in all ROWS hashes of at least one of BANDS bands become candidates. That selects
1 - (1 - s^ROWS)^BANDS of the pairs with similarity s (Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets",
section 3.4).
"""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from tokens.format.token_file import TokenStream
from tokens.search import stream_blocks
from tokens.search.ngrams import Ngrams, hash_columns, mixed, words_of_ngrams
from tokens.search.stream_blocks import common_dtype, in_blocks, locate

# Number of tokens in an n-gram. It is small because two texts from one template share only short runs of words.
SHINGLE = 5
BANDS, ROWS = 20, 4
# Lowest similarity of near-duplicates. Pairs with a similarity of 0.6 become candidates with a probability of 94%, and
# pairs with a similarity of 0.8 with a probability of 99.997%.
SIMILARITY = 0.6
KEPT_PAIRS = 5  # maximum number of pairs that are kept as examples
EMPTY = np.uint32((1 << 32) - 1)  # hash of a document without n-grams


@attrs.frozen(eq=False)
class NearDuplicates:
    """The non-empty documents of streams and, for each of them, the first document of its group.

    Documents are in the same group if they are near-duplicates, directly or through other documents.
    """

    # position of each document's first token in the concatenation of all streams, int64 (documents,), ascending
    starts: np.ndarray
    lengths: np.ndarray  # tokens, int64 (documents,); a document with fewer than SHINGLE tokens is in no group
    originals: np.ndarray  # number of the first document in the group, int64 (documents,)
    # A few pairs of similar but not identical documents: their Jaccard similarity and the numbers of the two documents
    pairs: list[tuple[float, int, int]]


def near_duplicates(streams: Sequence[TokenStream], end_of_text_id: int) -> NearDuplicates:
    """Compare all documents of streams. Needs about 250 bytes of memory for each document.

    If several documents agree in a band, each of them is compared with the first and with the previous one. Raises
    BadInput like `in_blocks`.
    """
    parts = list(_signatures(streams, end_of_text_id))
    starts, lengths = (np.concatenate([np.zeros(0, np.int64), *(part[k] for part in parts)]) for k in (0, 1))
    originals = np.arange(len(starts))
    pairs: list[tuple[float, int, int]] = []
    long = np.flatnonzero(lengths >= SHINGLE)
    for band in range(BANDS * (len(long) > 0)):
        keys = np.concatenate([part[2][:, band] for part in parts])[long]
        order = np.argsort(keys, kind="stable")
        is_repeated = np.diff(keys[order], prepend=keys[order[0]]) == 0
        is_repeated[0] = False
        first = np.maximum.accumulate(np.where(is_repeated, 0, np.arange(len(order))))
        repeated = np.flatnonzero(is_repeated)
        for earlier in (first[repeated], repeated - 1):
            earlier_documents, later_documents = long[order[earlier]], long[order[repeated]]
            separate = _roots(originals, earlier_documents) != _roots(originals, later_documents)
            pairs_to_compare = zip(
                earlier_documents[separate].tolist(), later_documents[separate].tolist(), strict=True
            )
            for first_document, second_document in pairs_to_compare:
                roots = _roots(originals, np.array([first_document, second_document]))
                if roots[0] == roots[1]:
                    continue
                places = [
                    (*locate(streams, int(starts[k])), int(lengths[k])) for k in (first_document, second_document)
                ]
                similarity = _similarity([stream.read(at, length) for stream, at, length in places])
                if similarity >= SIMILARITY:
                    originals[roots.max()] = roots.min()
                    is_new = all(first_document != pair[1] for pair in pairs)
                    if similarity < 1 and len(pairs) < KEPT_PAIRS and is_new:
                        pairs.append((similarity, first_document, second_document))
    return NearDuplicates(starts, lengths, _roots(originals, originals), pairs)


def _signatures(streams: Sequence[TokenStream], end: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each block, yield three arrays about the documents that end there: start positions, lengths, and band keys.

    The band keys are uint64 (documents, BANDS).
    """
    draw, dtype = np.random.default_rng(0).integers, common_dtype(streams)
    masks, factors = draw(0, 1 << 32, (2, BANDS * ROWS), np.uint32) | np.array([[0], [1]], np.uint32)  # factors are odd

    def least_hashes(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions where documents end in a block, and the least hashes of each part of the block.

        The ends divide the block into parts.
        """
        words, ends = words_of_ngrams(block.astype(dtype, copy=False), SHINGLE), np.flatnonzero(block == end)
        is_inside = np.ones(len(block), bool)  # True if the n-gram at this token contains no end of text
        is_inside[np.maximum(ends[:, None] - np.arange(SHINGLE), 0)] = is_inside[len(words[0]) :] = False
        places = np.flatnonzero(is_inside)
        hashes = (mixed(hash_columns(words)) >> np.uint64(32)).astype(np.uint32)[places]
        ends = ends[ends < stream_blocks.SEARCHED_TOKENS]
        edges = np.array([0, *np.searchsorted(places, ends), len(places)])
        filled = np.flatnonzero(np.diff(edges))
        least = np.full((len(ends) + 1, BANDS * ROWS), EMPTY)
        for k in range(BANDS * ROWS if len(filled) else 0):
            least[filled, k] = np.minimum.reduceat((hashes ^ masks[k]) * factors[k], edges[filled])
        return ends, least

    begin = done = 0  # first token of the current document; number of tokens in the streams so far
    for stream in streams:
        # `rest` holds the least hashes of a document that continues in the next block.
        rest, done = np.full(BANDS * ROWS, EMPTY), done + stream.length
        for at, (ends, least) in in_blocks([stream], least_hashes, SHINGLE - 1):
            least[0] = np.minimum(least[0], rest)
            rest, closed = least[-1], ends + at + done - stream.length
            if at + stream_blocks.SEARCHED_TOKENS >= stream.length:  # the last document may have no end-of-text id
                closed = np.append(closed, done)
            starts = np.append(begin, closed + 1)[:-1]
            begin = int(np.append(begin, closed + 1)[-1])
            nonempty = closed > starts
            bands = np.split(least[: len(closed)][nonempty], BANDS, axis=1)
            keys = np.stack([hash_columns([*band.T], seed) for seed, band in enumerate(bands)], axis=1)
            yield starts[nonempty], (closed - starts)[nonempty], keys
        begin = done


def _similarity(documents: list[np.ndarray]) -> float:
    """Return the Jaccard similarity of two documents, which are compared as sets of n-grams."""
    ngrams = Ngrams(documents, SHINGLE, np.dtype(np.uint32))
    occurs = np.zeros((2, ngrams.count), bool)
    occurs[ngrams.sequences, ngrams.numbers] = True
    return float(occurs.all(0).sum() / occurs.any(0).sum())


def _roots(originals: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return, for each document, the first document of its group."""
    while (originals[numbers] != numbers).any():
        numbers = originals[numbers]
    return numbers
