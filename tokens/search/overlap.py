"""Items that share an n-gram with token streams: contamination of training data by evaluation items.

An item is one or several sequences of tokens: fields of a record, forms of a text, or a document. n = 13 is the length
of Brown et al., "Language Models are Few-Shot Learners" (2020), appendix C, and of the studies after it. Of an item
without so long a sequence, those of LEAST tokens or more are searched for whole.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from common.errors import BadInput
from tokens.format.manifest import open_listed, read_manifest
from tokens.format.token_file import TokenStream
from tokens.search.ngrams import NgramFinder, Ngrams
from tokens.search.stream_blocks import common_dtype, in_blocks
from tokens.tokenizer.loading import is_recorded
from tokens.tokenizer.tokenizer import Tokenizer

GRAM = 13
LEAST = 8  # tokens: fewer stand in any text by chance
PASS_TOKENS = 1 << 21  # of items, searched for at a time: some 100 bytes of memory each
NOWHERE = np.iinfo(np.int64).max

Item = Sequence[np.ndarray]  # of tokens, each 1-D


@attrs.frozen(eq=False)
class Overlap:
    """Overlap of items with streams: the first place of an n-gram that both have."""

    lengths: np.ndarray  # tokens searched for or found, int64 (items,): n, fewer of short items, 0 of too short ones
    places: np.ndarray  # of the first found among the tokens of all streams, int64 (items,), or NOWHERE

    @property
    def touched(self) -> np.ndarray:
        """True for each item with an n-gram in the streams, bool (items,); False for those that are too short."""
        return self.places != NOWHERE


def find_overlap(streams: Sequence[TokenStream], items: Sequence[Item], n: int = GRAM) -> Overlap:
    """Search for all items, PASS_TOKENS of them at a time. Raises BadInput for a file that cannot be read any more."""
    longest = np.array([max(map(len, item), default=0) for item in items], np.int64)
    lengths = np.where(longest < min(n, LEAST), 0, np.minimum(longest, n))
    places = np.full(len(items), NOWHERE)
    least = np.where(longest < n, LEAST, n).tolist()
    wanted = [(number, ids) for number, item in enumerate(items) for ids in item if len(ids) >= min(n, least[number])]
    wanted.sort(key=lambda pair: min(n, len(pair[1])))
    sizes = np.array([len(ids) for _, ids in wanted], np.int64)
    kinds = np.diff(np.cumsum(sizes) // PASS_TOKENS) | np.diff(np.minimum(sizes, n))  # 0: in the same pass
    for part in np.split(np.arange(len(wanted)), np.flatnonzero(kinds) + 1):
        owners, sequences = zip(*(wanted[k] for k in part.tolist()), strict=True) if len(part) else ((), ())
        ngrams = Ngrams(sequences, min([n, *map(len, sequences)]), common_dtype(streams))
        finder, first = NgramFinder(ngrams), np.full(ngrams.count, NOWHERE)
        for at, (offsets, found) in in_blocks(streams, finder.find, ngrams.n - 1):
            np.minimum.at(first, found, offsets + at)
        before = places.copy()
        np.minimum.at(places, np.array(owners, np.int64)[ngrams.sequences], first[ngrams.numbers])
        lengths[places < before] = ngrams.n
    return Overlap(lengths, places)


def documents(stream: TokenStream, end_of_text_id: int, start: int = 0, count: int | None = None) -> list[Item]:
    """Return the documents of a range of a stream, in memory, without end-of-text ids; empty ones are left out."""
    tokens = stream.read(start, stream.length - start if count is None else count)
    ends = [*np.flatnonzero(tokens == end_of_text_id).tolist(), len(tokens)]
    return [[tokens[begin + 1 : end]] for begin, end in itertools.pairwise([-1, *ends]) if end > begin + 1]


def forms(tokenizer: Tokenizer, text: str) -> list[np.ndarray]:
    """Return the ids of a text at the beginning of a document, and after a space, as in the middle of a sentence."""
    return [tokenizer.encode(text), tokenizer.encode(f" {text}")]


def open_comparable(directory: Path, split: str, tokenizer: Tokenizer) -> TokenStream:
    """Open a split of a token directory. Raises BadInput without one, or for ids of another tokenizer."""
    manifest = read_manifest(directory)
    if manifest is not None and not is_recorded(tokenizer, manifest.tokenizer, directory):
        raise BadInput(f"{directory}: got ids of tokenizer {manifest.tokenizer.name}, wanted those of {tokenizer.name}")
    return open_listed(directory, split, manifest)
