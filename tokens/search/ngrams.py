"""N-grams of token sequences, numbered, and found in blocks: bit filter of hashes, then exact comparison.

Tokens are hashed and compared as words of up to 8 bytes. A block is not hashed at each of its tokens: an n-gram that
begins at token p covers a multiple of `stride` in p .. p + stride - 1 and the `width` tokens from there on, as stride +
width - 1 <= n. So the hashes of `width` tokens at multiples of the stride are looked up among those of all runs of
`width` tokens in the n-grams; only around those found are n tokens hashed, looked up and compared. Bit filter: Bloom,
CACM 13(7), 1970.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

STRIDED_TOKENS = 8  # hashed at a stride, at most: few texts share as many by chance
WORD_BYTES = 8
BITS_PER_HASH = 16  # of a filter, at least: each of two probes lets one in 8 others pass
LEAST_BITS = 1 << 20  # stays in the cache of a core
MIXER = np.uint64(0x9E3779B97F4A7C15)  # odd, 2^64 / golden ratio


class Ngrams:
    """The n-grams of sequences of tokens: where each begins, and a number that equal ones share, from 0 on."""

    def __init__(self, sequences: Sequence[np.ndarray], n: int, dtype: np.dtype):
        """Take the n-grams of sequences (1-D) of n tokens or more, but those with an id that the type cannot hold."""
        self.n = n
        tokens = np.concatenate([np.zeros(0, np.uint32), *sequences]).astype(np.uint32)
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        counts = np.maximum(lengths - n + 1, 0)  # of n-grams
        before = np.cumsum(lengths) - lengths - (np.cumsum(counts) - counts)
        starts = np.arange(counts.sum()) + np.repeat(before, counts)
        too_large = np.cumsum(np.append(0, tokens > np.iinfo(dtype).max))
        held = too_large[starts + n] == too_large[starts]
        self.tokens = tokens.astype(dtype)
        self.starts = starts[held]  # of each n-gram, in `tokens`
        self.sequences = np.repeat(np.arange(len(lengths)), counts)[held]  # the sequence of each
        words = words_of_ngrams(self.tokens, n)
        for self.seed in itertools.count():
            hashes = hash_columns(words, self.seed)[self.starts]
            self.hashes, first, self.numbers = np.unique(hashes, return_index=True, return_inverse=True)  # by number
            self.firsts = self.starts[first]  # of each number, in `tokens`
            # Two of one hash would hide one another: other factors hash them apart.
            if all((word[self.starts] == word[self.firsts][self.numbers]).all() for word in words):
                break

    @property
    def count(self) -> int:
        """Number of distinct n-grams."""
        return len(self.hashes)


class NgramFinder:
    """Finds n-grams in blocks of tokens."""

    def __init__(self, ngrams: Ngrams):
        self._ngrams, per_word = ngrams, WORD_BYTES // ngrams.tokens.itemsize
        while 2 * per_word - 1 > ngrams.n:
            per_word //= 2
        self._per_word, most = per_word, max(1, STRIDED_TOKENS // per_word)
        self._stride = max(1, (ngrams.n + 1) // per_word - most) * per_word  # in tokens
        self._words = min(most, (ngrams.n + 1 - self._stride) // per_word)  # hashed together
        self._filter, self._strided = BitFilter(ngrams.hashes), BitFilter(self._hashes_of_runs())

    def find(self, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of n-grams in a block (1-D), ascending, and the number of each, both int64, 1-D."""
        ngrams = self._ngrams
        if len(block) < ngrams.n or not ngrams.count:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        block = block.astype(ngrams.tokens.dtype, copy=False)
        places = self._candidates(block)
        words = words_of_ngrams(block, ngrams.n)
        hashes = hash_columns([word[places] for word in words], ngrams.seed)
        kept = self._filter.held(hashes)
        places, hashes = places[kept], hashes[kept]
        numbers = np.minimum(np.searchsorted(ngrams.hashes, hashes), ngrams.count - 1)
        exact, firsts = np.ones(len(places), bool), ngrams.firsts[numbers]
        for word, wanted in zip(words, words_of_ngrams(ngrams.tokens, ngrams.n), strict=True):
            exact &= word[places] == wanted[firsts]
        return places[exact], numbers[exact]

    def _candidates(self, block: np.ndarray) -> np.ndarray:
        """Return the places around which a strided hash is one of the n-grams', ascending."""
        words = block[: len(block) // self._per_word * self._per_word].view(f"u{self._per_word * block.itemsize}")
        count = (len(words) - self._words) * self._per_word // self._stride + 1
        hashes = hash_columns([words[k :: self._stride // self._per_word][:count] for k in range(self._words)])
        places = (self._strided.held(hashes)[:, None] * self._stride + np.arange(1 - self._stride, 1)).reshape(-1)
        return places[np.searchsorted(places, 0) : np.searchsorted(places, len(block) - self._ngrams.n, "right")]

    def _hashes_of_runs(self) -> np.ndarray:
        """Return the hashes of all runs in the n-grams of as many tokens as are hashed together."""
        ngrams, width = self._ngrams, self._words * self._per_word
        count = max(0, len(ngrams.tokens) - width + 1)
        begins = np.zeros(count, bool)  # True where a run of some n-gram begins
        for offset in range(ngrams.n - width + 1):
            begins[ngrams.starts + offset] = True
        words = _words(ngrams.tokens, self._per_word)
        return hash_columns([words[k * self._per_word :][:count] for k in range(self._words)])[begins]


class BitFilter:
    """A set of uint64 hashes as bits, two for each: holds all of them, and few others."""

    def __init__(self, hashes: np.ndarray):
        self._shift = np.uint64(64 - (max(LEAST_BITS, BITS_PER_HASH * len(hashes)) - 1).bit_length())
        self._bytes = np.zeros(1 << (61 - int(self._shift)), np.uint8)
        for bits in (hashes >> self._shift, mixed(hashes) >> self._shift):
            np.bitwise_or.at(self._bytes, bits >> np.uint64(3), np.uint8(1) << (bits.astype(np.uint8) & np.uint8(7)))

    def held(self, hashes: np.ndarray) -> np.ndarray:
        """Return the indices, ascending, of the hashes (1-D) that may be in the set."""
        first = np.flatnonzero(self._probe(hashes))
        return first[self._probe(mixed(hashes[first]))]

    def _probe(self, hashes: np.ndarray) -> np.ndarray:
        bits = hashes >> self._shift
        found = self._bytes.take((bits >> np.uint64(3)).view(np.int64))
        found >>= bits.astype(np.uint8) & np.uint8(7)
        found &= np.uint8(1)
        return found.view(bool)


def words_of_ngrams(tokens: np.ndarray, n: int) -> list[np.ndarray]:
    """Return views of tokens (1-D, contiguous) as words: an n-gram is its words at the index of its first token."""
    per_word = min(WORD_BYTES // tokens.itemsize, 1 << (n.bit_length() - 1))
    words, count = _words(tokens, per_word), max(0, len(tokens) - n + 1)
    return [words[k : k + count] for k in sorted({*range(0, n - per_word + 1, per_word), n - per_word})]


def hash_columns(columns: Sequence[np.ndarray], seed: int = 0) -> np.ndarray:
    """Return a hash of each row of columns (1-D, unsigned): their sum times random odd numbers, modulo 2^64."""
    hashes = np.zeros(len(columns[0]), np.uint64)
    terms = np.empty_like(hashes)
    for column, factor in zip(columns, _factors(len(columns), seed), strict=True):
        hashes += np.multiply(column, factor, out=terms)
    return hashes


def mixed(hashes: np.ndarray) -> np.ndarray:
    """Return uint64 hashes whose high bits depend on all bits of others."""
    return (hashes ^ (hashes >> np.uint64(32))) * MIXER


def _words(tokens: np.ndarray, per_word: int) -> np.ndarray:
    """Return a view of tokens as words of `per_word` tokens, one from each token on."""
    kind, count = f"u{per_word * tokens.itemsize}", max(0, len(tokens) - per_word + 1)
    return np.ndarray(count, kind, tokens if count else np.zeros(1, np.uint64), 0, (tokens.itemsize,))


@lru_cache
def _factors(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 63, count, np.uint64) * np.uint64(2) + np.uint64(1)
