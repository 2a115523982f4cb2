"""Faster ways to do what tiktoken does with GPT-2's pattern, each taken only where it is found to do the same."""

import ctypes
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from tokens.tokenizer import END_OF_TEXT, BytePairTokenizer, Encoder, load_tokenizer, token_dtype

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
    ranks, letters = tokenizer.ranks(), _letters()
    halves = _halves(ranks)
    if halves is None:
        return None
    spelled = {token: token.decode("latin-1").translate(letters) for token in ranks}
    splitting = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    values: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": tokenizer.end_of_text_id,
                "content": END_OF_TEXT,
                "special": True,
                **dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False),
            }
        ],
        "pre_tokenizer": splitting,
        "decoder": splitting,
        "model": {
            "type": "BPE",
            "vocab": {spelling: ranks[token] for token, spelling in spelled.items()},
            "merges": [f"{spelled[left]} {spelled[right]}" for left, right in halves.values()],
        },
    }
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


def _halves(ranks: dict[bytes, int]) -> dict[bytes, tuple[bytes, bytes]] | None:
    """Return the two tokens that are merged into each longer one, in the order of ranks; None where one has none."""
    halves: dict[bytes, tuple[bytes, bytes]] = {}
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) == 1:
            continue
        rank = ranks[token]
        for cut in _cuts(len(token)):
            left, right = token[:cut], token[cut:]
            if ranks.get(left, rank) < rank > ranks.get(right, rank) and _meet(left, right, rank, ranks, halves):
                halves[token] = left, right
                break
        else:
            return None
    return halves


def _meet(left: bytes, right: bytes, rank: int, ranks: dict[bytes, int], halves: dict[bytes, Any]) -> bool:
    """Tell whether byte-pair encoding of left + right has just these two before the merge of that rank.

    It does unless the neighbours of the place between them merge at some moment before. That is looked at backwards in
    time: the later of the two is taken apart, the right one of two alike, since merges go from left to right.
    """
    left_ends = right_ends = rank  # when the neighbour on that side becomes a part of a longer one
    left_rank, right_rank = ranks[left], ranks[right]
    while len(left) > 1 or len(right) > 1:
        if len(left) > 1 and (left_rank > right_rank or len(right) == 1):
            left_ends, left = left_rank, halves[left][1]
            left_rank = ranks[left]
        else:
            right_ends, right = right_rank, halves[right][0]
            right_rank = ranks[right]
        merged = ranks.get(left + right, rank)
        if merged < left_ends and merged <= right_ends:
            return False
    return True


@cache
def _cuts(length: int) -> list[int]:
    """Return where a token of so many bytes may be cut, the likeliest first: near its middle."""
    return sorted(range(1, length), key=lambda cut: abs(2 * cut - length))


def _letters() -> dict[int, str]:
    """Return the printable character that stands for each byte in GPT-2's vocabulary files.

    A byte that Latin-1 prints stands for itself; the others follow from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(0x100 + index) for index, byte in enumerate(others)}
