"""N-grams of token sequences: number them, and find them in blocks with a bit filter of hashes and exact comparison.

Tokens are hashed and compared as words of up to 8 bytes. To save time, a block is not hashed at every token. An n-gram
that begins at token p covers one position in p .. p + stride - 1 that is a multiple of `stride`, and also the `width`
tokens from that position on, because stride + width - 1 <= n. So only the runs of `width` tokens that begin at
multiples of `stride` are hashed, and looked up among the hashes of all runs of `width` tokens in the n-grams. Complete
n-grams are hashed, looked up and compared only around the matches. The bit filter follows Bloom, CACM 13(7), 1970.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

STRIDED_TOKENS = 8  # maximum number of tokens that are hashed together; few texts share 8 tokens by chance
WORD_BYTES = 8
# Minimum number of bits in the filter for each hash. Each hash sets two bits, so at most 1/8 of the bits are set. A
# probe reads one bit, so it accepts a wrong hash in at most 1 of 8 cases.
BITS_PER_HASH = 16
LEAST_BITS = 1 << 20  # a filter of this size stays in the cache of a core
MIXER = np.uint64(0x9E3779B97F4A7C15)  # an odd number, 2^64 / golden ratio


class Ngrams:
    """The n-grams of token sequences: where each begins, and its number (0, 1, 2 ...). Equal n-grams share a number."""

    def __init__(self, sequences: Sequence[np.ndarray], n: int, dtype: np.dtype):
        """Take the n-grams of all sequences (1-D), except n-grams with an id that `dtype` cannot hold."""
        self.n = n
        tokens = np.concatenate([np.zeros(0, np.uint32), *sequences]).astype(np.uint32)
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        counts = np.maximum(lengths - n + 1, 0)  # n-grams of each sequence
        before = np.cumsum(lengths) - lengths - (np.cumsum(counts) - counts)
        starts = np.arange(counts.sum()) + np.repeat(before, counts)
        too_large = np.cumsum(np.append(0, tokens > np.iinfo(dtype).max))
        fits = too_large[starts + n] == too_large[starts]
        self.tokens = tokens.astype(dtype)
        self.starts = starts[fits]  # position in `tokens` of each n-gram's first token
        self.sequences = np.repeat(np.arange(len(lengths)), counts)[fits]  # sequence of each n-gram
        words = words_of_ngrams(self.tokens, n)
        for self.seed in itertools.count():
            hashes = hash_columns(words, self.seed)[self.starts]
            # `hashes` and `first` are indexed by the number of an n-gram.
            self.hashes, first, self.numbers = np.unique(hashes, return_index=True, return_inverse=True)
            self.firsts = self.starts[first]  # position in `tokens` of the first n-gram with each number
            # Different n-grams with the same hash would hide each other; another seed gives them different hashes.
            if all((word[self.starts] == word[self.firsts][self.numbers]).all() for word in words):
                break

    @property
    def count(self) -> int:
        """Number of different n-grams."""
        return len(self.hashes)


class NgramFinder:
    """Finds given n-grams in blocks of tokens."""

    def __init__(self, ngrams: Ngrams):
        self._ngrams, per_word = ngrams, WORD_BYTES // ngrams.tokens.itemsize
        while 2 * per_word - 1 > ngrams.n:
            per_word //= 2
        self._per_word, longest = per_word, max(1, STRIDED_TOKENS // per_word)
        self._stride = max(1, (ngrams.n + 1) // per_word - longest) * per_word  # in tokens
        self._words = min(longest, (ngrams.n + 1 - self._stride) // per_word)  # words that are hashed together
        self._filter, self._strided = BitFilter(ngrams.hashes), BitFilter(self._hashes_of_runs())

    def find(self, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions in a block (1-D) at which n-grams begin, in ascending order, and the n-grams' numbers.

        Both are 1-D int64 arrays.
        """
        ngrams = self._ngrams
        if len(block) < ngrams.n or not ngrams.count:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        block = block.astype(ngrams.tokens.dtype, copy=False)
        places = self._candidates(block)
        words = words_of_ngrams(block, ngrams.n)
        hashes = hash_columns([word[places] for word in words], ngrams.seed)
        matches = self._filter.possible_members(hashes)
        places, hashes = places[matches], hashes[matches]
        numbers = np.minimum(np.searchsorted(ngrams.hashes, hashes), ngrams.count - 1)
        exact, firsts = np.ones(len(places), bool), ngrams.firsts[numbers]
        for word, ngram_word in zip(words, words_of_ngrams(ngrams.tokens, ngrams.n), strict=True):
            exact &= word[places] == ngram_word[firsts]
        return places[exact], numbers[exact]

    def _candidates(self, block: np.ndarray) -> np.ndarray:
        """Return the positions at which n-grams may begin, in ascending order. A hash near each position matches."""
        words = block[: len(block) // self._per_word * self._per_word].view(f"u{self._per_word * block.itemsize}")
        count = (len(words) - self._words) * self._per_word // self._stride + 1
        hashes = hash_columns([words[k :: self._stride // self._per_word][:count] for k in range(self._words)])
        places = (
            self._strided.possible_members(hashes)[:, None] * self._stride + np.arange(1 - self._stride, 1)
        ).reshape(-1)
        return places[np.searchsorted(places, 0) : np.searchsorted(places, len(block) - self._ngrams.n, "right")]

    def _hashes_of_runs(self) -> np.ndarray:
        """Return the hashes of all runs inside the n-grams. These runs are as long as the hashed runs of a block."""
        ngrams, width = self._ngrams, self._words * self._per_word
        count = max(0, len(ngrams.tokens) - width + 1)
        begins = np.zeros(count, bool)  # True if a run of some n-gram begins at this token
        for offset in range(ngrams.n - width + 1):
            begins[ngrams.starts + offset] = True
        words = _words(ngrams.tokens, self._per_word)
        return hash_columns([words[k * self._per_word :][:count] for k in range(self._words)])[begins]


class BitFilter:
    """A set of uint64 hashes that stores two bits per hash. It accepts every hash in the set, and a few others."""

    def __init__(self, hashes: np.ndarray):
        self._shift = np.uint64(64 - (max(LEAST_BITS, BITS_PER_HASH * len(hashes)) - 1).bit_length())
        self._bytes = np.zeros(1 << (61 - int(self._shift)), np.uint8)
        for bits in (hashes >> self._shift, mixed(hashes) >> self._shift):
            np.bitwise_or.at(self._bytes, bits >> np.uint64(3), np.uint8(1) << (bits.astype(np.uint8) & np.uint8(7)))

    def possible_members(self, hashes: np.ndarray) -> np.ndarray:
        """Return the indices, ascending, of the hashes (1-D) that may be in the set."""
        candidates = np.flatnonzero(self._probe(hashes))
        return candidates[self._probe(mixed(hashes[candidates]))]

    def _probe(self, hashes: np.ndarray) -> np.ndarray:
        bits = hashes >> self._shift
        bit_set = self._bytes.take((bits >> np.uint64(3)).view(np.int64))
        bit_set >>= bits.astype(np.uint8) & np.uint8(7)
        bit_set &= np.uint8(1)
        return bit_set.view(bool)


def words_of_ngrams(tokens: np.ndarray, n: int) -> list[np.ndarray]:
    """Return views of tokens (1-D, contiguous) as words.

    Together, the words with index i in all views make up the n-gram that begins at token i.
    """
    per_word = min(WORD_BYTES // tokens.itemsize, 1 << (n.bit_length() - 1))
    words, count = _words(tokens, per_word), max(0, len(tokens) - n + 1)
    return [words[k : k + count] for k in sorted({*range(0, n - per_word + 1, per_word), n - per_word})]


def hash_columns(columns: Sequence[np.ndarray], seed: int = 0) -> np.ndarray:
    """Return a hash of each row of the columns (1-D, unsigned).

    Each column is multiplied by a random odd number. The hash is the sum of the products modulo 2^64.
    """
    hashes = np.zeros(len(columns[0]), np.uint64)
    terms = np.empty_like(hashes)
    for column, factor in zip(columns, _factors(len(columns), seed), strict=True):
        hashes += np.multiply(column, factor, out=terms)
    return hashes


def mixed(hashes: np.ndarray) -> np.ndarray:
    """Return new uint64 hashes whose high bits depend on all bits of the given hashes."""
    return (hashes ^ (hashes >> np.uint64(32))) * MIXER


def _words(tokens: np.ndarray, per_word: int) -> np.ndarray:
    """Return a view of tokens as words of `per_word` tokens, with one word starting at every token."""
    kind, count = f"u{per_word * tokens.itemsize}", max(0, len(tokens) - per_word + 1)
    return np.ndarray(count, kind, tokens if count else np.zeros(1, np.uint64), 0, (tokens.itemsize,))


@lru_cache
def _factors(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 63, count, np.uint64) * np.uint64(2) + np.uint64(1)
