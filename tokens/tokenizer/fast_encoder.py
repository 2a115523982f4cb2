"""Faster ways to do what tiktoken does with GPT-2's pattern, each taken only where it is found to do the same."""

import ctypes
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tokens.tokenizer.hugging_face_files import tokenizer_json
from tokens.tokenizer.tokenizer import BytePairTokenizer, Encoder, load_tokenizer, token_dtype

if TYPE_CHECKING:
    import fastokens


# GPT-2's pattern with all in one group that looks neither ahead nor back: tiktoken's engine runs the group as a finite
# automaton, which takes two thirds of the time. Letters come first, for speed; contractions stay before symbols, which
# may begin with an apostrophe as well.
GROUPED_PATTERN = r"(?: ?\p{L}+|'(?:[sdmt]|ll|ve|re)| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"

FORGET_TOKENS = 1 << 24  # after so many, fastokens forgets the words that it has met


@attrs.frozen(kw_only=True)
class Recipe:
    """A byte-pair encoding in a file, for processes that need not load it with tiktoken first."""

    path: Path  # in the form of Hugging Face's tokenizer.json
    vocabulary_size: int
    end_of_text_id: int


class FastBytePairEncoder:
    """The ids of a `BytePairTokenizer`, computed by fastokens.

    It remembers the words that it has met, up to 100 MB of them, as long as the thread lives that met them. So it runs
    in a thread that is replaced now and then: memory does not grow with the words of the text.
    """

    def __init__(self, recipe: Recipe, encoding: "fastokens.Tokenizer"):
        self.vocabulary_size = recipe.vocabulary_size
        self.end_of_text_id = recipe.end_of_text_id
        self._dtype = token_dtype(recipe.vocabulary_size)
        self._encoding = encoding
        self._thread = ThreadPoolExecutor(1)
        self._remembered = 0

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        forget = self._remembered > FORGET_TOKENS
        if forget:
            self._thread.shutdown()
            self._thread, self._remembered = ThreadPoolExecutor(1), 0
        encode = self._encoding.encode_batch_flat
        ids, offsets = self._thread.submit(encode, texts, split_special_tokens=True).result()
        if forget:  # and not before: up to Python 3.12 a thread that was shut down frees its memory a moment later
            _give_back_memory()
        lengths = np.diff(np.frombuffer(offsets, "<u8").astype(np.int64))
        self._remembered += len(ids) // 4
        return np.frombuffer(ids, "<u4").astype(self._dtype), lengths


def write_recipe(tokenizer: BytePairTokenizer, path: Path) -> Recipe | None:
    """Write what fastokens needs, or return None for ranks that no sequence of merges gives.

    fastokens reads .tiktoken files as well, but then splits text by a general regular expression; where GPT-2's way of
    splitting is named, it is three times as fast.
    """
    values = tokenizer_json(tokenizer)
    if values is None:
        return None
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    return Recipe(
        path=path.absolute(), vocabulary_size=tokenizer.vocabulary_size, end_of_text_id=tokenizer.end_of_text_id
    )


def encoders(name: str, recipe: Recipe | None) -> Iterator[Encoder]:
    """Yield what may do the same as the tokenizer of that name, the fastest first, and itself at last."""
    os.environ.update(RAYON_NUM_THREADS="1", FASTOKENS_BPE_THREADS="1")  # the processes are the parallelism
    if recipe is not None and has_fastokens():
        import fastokens

        yield FastBytePairEncoder(recipe, fastokens.Tokenizer.from_file(str(recipe.path)))
    tokenizer = load_tokenizer(name)
    if isinstance(tokenizer, BytePairTokenizer):
        yield tokenizer.with_pattern(GROUPED_PATTERN)
    yield tokenizer


def _give_back_memory() -> None:
    """Let glibc, which keeps what was freed among small things, return it to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def has_fastokens() -> bool:
    """Tell whether the optional package can be imported."""
    try:
        import fastokens  # noqa: F401
    except ImportError:
        return False
    return True
