"""Items that share an n-gram with token streams: contamination of training data by evaluation items.

An item is one or more sequences of tokens, such as the fields of a record, two spellings of a text, or a document. The
length n = 13 follows Brown et al., "Language Models are Few-Shot Learners" (2020), appendix C, and later studies. If
none of an item's sequences has n tokens, its sequences of at least LEAST tokens are searched for as a whole.
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
LEAST = 8  # tokens; shorter sequences occur in any text by chance
PASS_TOKENS = 1 << 21  # tokens of items that are searched for in one pass; each token needs about 100 bytes of memory
NOWHERE = np.iinfo(np.int64).max

Item = Sequence[np.ndarray]  # sequences of tokens, each 1-D


@attrs.frozen(eq=False)
class Overlap:
    """For each item, the first place in the streams at which an n-gram of the item occurs."""

    # Length of the n-gram that was searched for or found, int64 (items,). It is n for a long item, less for a short
    # item, and 0 for an item that is too short to be searched for.
    lengths: np.ndarray
    # position of the first match in the concatenation of all streams, int64 (items,), or NOWHERE
    places: np.ndarray

    @property
    def touched(self) -> np.ndarray:
        """Whether each item shares an n-gram with the streams, bool (items,). False for an item that is too short."""
        return self.places != NOWHERE


def find_overlap(streams: Sequence[TokenStream], items: Sequence[Item], n: int = GRAM) -> Overlap:
    """Search streams for all items. Each pass searches for items with about PASS_TOKENS tokens in total.

    Raises BadInput if a file can no longer be read.
    """
    longest = np.array([max(map(len, item), default=0) for item in items], np.int64)
    lengths = np.where(longest < min(n, LEAST), 0, np.minimum(longest, n))
    places = np.full(len(items), NOWHERE)
    least = np.where(longest < n, LEAST, n).tolist()
    targets = [(number, ids) for number, item in enumerate(items) for ids in item if len(ids) >= min(n, least[number])]
    targets.sort(key=lambda target: min(n, len(target[1])))
    sizes = np.array([len(ids) for _, ids in targets], np.int64)
    # Entry i is 0 if target i + 1 is searched for in the same pass as target i.
    kinds = np.diff(np.cumsum(sizes) // PASS_TOKENS) | np.diff(np.minimum(sizes, n))
    for part in np.split(np.arange(len(targets)), np.flatnonzero(kinds) + 1):
        item_numbers, sequences = zip(*(targets[k] for k in part.tolist()), strict=True) if len(part) else ((), ())
        ngrams = Ngrams(sequences, min([n, *map(len, sequences)]), common_dtype(streams))
        finder, first = NgramFinder(ngrams), np.full(ngrams.count, NOWHERE)
        for at, (offsets, ngram_numbers) in in_blocks(streams, finder.find, ngrams.n - 1):
            np.minimum.at(first, ngram_numbers, offsets + at)
        before = places.copy()
        np.minimum.at(places, np.array(item_numbers, np.int64)[ngrams.sequences], first[ngrams.numbers])
        lengths[places < before] = ngrams.n
    return Overlap(lengths, places)


def documents(stream: TokenStream, end_of_text_id: int, start: int = 0, count: int | None = None) -> list[Item]:
    """Return the non-empty documents in a range of a stream. They are in memory, and have no end-of-text ids."""
    tokens = stream.read(start, stream.length - start if count is None else count)
    ends = [*np.flatnonzero(tokens == end_of_text_id).tolist(), len(tokens)]
    return [[tokens[begin + 1 : end]] for begin, end in itertools.pairwise([-1, *ends]) if end > begin + 1]


def forms(tokenizer: Tokenizer, text: str) -> list[np.ndarray]:
    """Return a text's ids in two forms: at the start of a document, and after a space, as inside a sentence."""
    return [tokenizer.encode(text), tokenizer.encode(f" {text}")]


def open_comparable(directory: Path, split: str, tokenizer: Tokenizer) -> TokenStream:
    """Open a split of a token directory.

    Raises BadInput if the directory does not have this split, or if its ids were made with another tokenizer.
    """
    manifest = read_manifest(directory)
    if manifest is not None and not is_recorded(tokenizer, manifest.tokenizer, directory):
        other_name = manifest.tokenizer.name
        problem = (
            f"its tokenizer {other_name} gives different ids than {tokenizer.name}, so the tokens are not comparable"
        )
        raise BadInput(f"{directory}: {problem}; pass tokens that were made with the same tokenizer")
    return open_listed(directory, split, manifest)
