"""Fast encoders, each used only if its ids are those of tiktoken on a probe."""

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from common.files import replace_file
from tokens.format.manifest import TokenizerRecord
from tokens.tokenizer.hugging_face_files import tokenizer_text
from tokens.tokenizer.known import GPT2, PATTERNS
from tokens.tokenizer.loading import recorded_tokenizer
from tokens.tokenizer.tokenizer import Encoder, Tokenizer, byte_pair_coder, token_dtype

if TYPE_CHECKING:
    import fastokens


# GPT-2's pattern with all in one group that looks neither ahead nor back: tiktoken's engine runs the group as a finite
# automaton, which takes two thirds of the time. Letters come first, for speed; contractions stay before symbols, which
# may begin with an apostrophe as well.
GROUPED_PATTERN = r"(?: ?\p{L}+|'(?:[sdmt]|ll|ve|re)| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"

# A contraction where case does not count, as "'S" is, after a letter or its mark: fastokens' o200k does not know it.
LONG_S = re.compile(r"[^\s!-/:-@\[-`{-~]'\u017f")


class FastBytePairEncoder:
    """fastokens with the ids of a byte-pair tokenizer. It caches up to 100 MB of words."""

    def __init__(self, encoding: "fastokens.Tokenizer", record: TokenizerRecord, exact: Callable[[], Tokenizer]):
        """`exact`: loads the tokenizer itself, for the rare texts on which this one differs."""
        self.end_of_text_id, self.vocabulary_size = record.end_of_text_id, record.vocabulary_size
        self._dtype = token_dtype(self.vocabulary_size)
        self._encoding = encoding
        self._exact = functools.cache(exact) if record.pattern == PATTERNS["o200k"] else None

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._exact is not None and any(LONG_S.search(text) for text in texts if "\u017f" in text):
            return self._exact().encode_batch(texts)
        ids, offsets = self._encoding.encode_batch_flat(texts, split_special_tokens=True)
        lengths = np.diff(np.frombuffer(offsets, "<u8").astype(np.int64))
        return np.frombuffer(ids, "<u4").astype(self._dtype), lengths


def write_recipe(tokenizer: Tokenizer, path: Path) -> Path | None:
    """Write a tokenizer.json for workers, which do not load tiktoken; return None without fastokens.

    It reads .tiktoken files as well, but splits by known patterns of a tokenizer.json three times as fast.
    """
    if importlib.util.find_spec("fastokens") is None:
        return None
    ordinary = attrs.evolve(tokenizer, special_tokens={})  # in a text they are
    replace_file(path, tokenizer_text(ordinary))
    return path.absolute()


def encoders(record: TokenizerRecord, ranks: Path, recipe: Path | None) -> Iterator[Encoder]:
    """Yield encoders that may match a tokenizer with ranks in a directory, the fastest first, itself last."""
    exact = functools.partial(recorded_tokenizer, record, ranks)
    os.environ.update(RAYON_NUM_THREADS="1", FASTOKENS_BPE_THREADS="1")  # the processes are the parallelism
    with suppress(ImportError, ValueError):  # it is optional, and does not read all of them
        if recipe is not None:
            import fastokens

            yield FastBytePairEncoder(fastokens.Tokenizer.from_file(str(recipe)), record, exact)
    tokenizer = exact()
    if tokenizer.pattern == GPT2:
        grouped = byte_pair_coder(tokenizer.name, tokenizer.coder.ranks, GROUPED_PATTERN)
        yield attrs.evolve(tokenizer, coder=grouped)
    yield tokenizer
