"""Fast encoders. Each is used only if it gives the same ids as tiktoken for the texts of a probe."""

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


# GPT-2's pattern, with one group for all parts that do not look ahead. tiktoken's engine runs the group as a finite
# automaton, which takes a third less time. Letters come first for speed. Contractions must come before symbols, because
# symbols may also begin with an apostrophe.
GROUPED_PATTERN = r"(?: ?\p{L}+|'(?:[sdmt]|ll|ve|re)| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"

# An apostrophe and a long s after a letter or a combining mark. If case is ignored, these two characters are the
# contraction "'s". fastokens does not recognize this contraction in o200k's pattern.
LONG_S = re.compile(r"[^\s!-/:-@\[-`{-~]'\u017f")


class FastBytePairEncoder:
    """Encodes with fastokens, which gives the ids of a byte-pair tokenizer and caches up to 100 MB of words."""

    def __init__(self, encoding: "fastokens.Tokenizer", record: TokenizerRecord, exact: Callable[[], Tokenizer]):
        """`exact` loads the tokenizer itself, for the rare texts for which fastokens gives different ids."""
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
    """Write a tokenizer.json, so that workers need not load tiktoken. Return None if fastokens is not installed.

    fastokens can also read .tiktoken files. But it splits text three times as fast if it finds a known pattern in a
    tokenizer.json.
    """
    if importlib.util.find_spec("fastokens") is None:
        return None
    ordinary = attrs.evolve(tokenizer, special_tokens={})  # special tokens in a text are ordinary text
    replace_file(path, tokenizer_text(ordinary))
    return path.absolute()


def encoders(record: TokenizerRecord, ranks: Path, recipe: Path | None) -> Iterator[Encoder]:
    """Yield encoders that should give a recorded tokenizer's ids: the fastest one first, and the tokenizer itself last.

    `ranks` is the directory that contains the tokenizer's byte-pair ranks.
    """
    exact = functools.partial(recorded_tokenizer, record, ranks)
    os.environ.update(RAYON_NUM_THREADS="1", FASTOKENS_BPE_THREADS="1")  # the worker processes already run in parallel
    with suppress(ImportError, ValueError):  # fastokens is optional, and cannot read every tokenizer
        if recipe is not None:
            import fastokens

            yield FastBytePairEncoder(fastokens.Tokenizer.from_file(str(recipe)), record, exact)
    tokenizer = exact()
    if tokenizer.pattern == GPT2:
        grouped = byte_pair_coder(tokenizer.name, tokenizer.coder.ranks, GROUPED_PATTERN)
        yield attrs.evolve(tokenizer, coder=grouped)
    yield tokenizer
