"""GPT-2's encoding as tiktoken computes it, and texts that are difficult for encoders."""

import functools
import random
from collections.abc import Iterator, Sequence

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from tiktoken_ext.openai_public import r50k_pat_str

from tests.conftest import shared
from tokens.tokenizer.loading import load_tokenizer
from tokens.tokenizer.tokenizer import Tokenizer


@functools.cache
def reference() -> tiktoken.Encoding:
    """Return GPT-2's encoding as tiktoken itself builds it."""
    ranks = load_tiktoken_bpe(str(shared("gpt2.tiktoken")))
    special = {"<|endoftext|>": 50256}
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)


# Characters that GPT-2's pattern distinguishes, characters whose class depends on the Unicode version, and texts that
# are difficult for regular expressions and byte-pair encoders.
PARTS = (
    *"aZé日ǅ1٣½Ⅷ!?'\u2019_-、€🙂\u0300\u200d\u00a0\u0085\u3000\x00\x1c\t\n\r\v\f",
    *("  ", "    ", "\r\n", "\n\n\n", "'s", "'re", "'LL", "'ve ", "<|endoftext|>", " the", "tion", "\U0010ffff"),
    *("\U000323b0", "\U00016ea0", "\u1c89", "\ua7cb", "a" * 100, "1" * 100, " " * 100, "é" * 50, "中" * 50),
)


def strange_texts(count: int, more: Sequence[str] = ()) -> Iterator[str]:
    draw = random.Random(0)
    for _ in range(count):
        yield "".join(draw.choices([*PARTS, *more], k=draw.randint(0, 30)))


def tiktokens() -> Tokenizer:
    tokenizer = load_tokenizer(str(shared("gpt2.tiktoken")))
    assert tokenizer.pattern is not None
    return tokenizer
