"""A faster byte-pair encoding, where it is installed and found to do what tiktoken does."""

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tokens.tokenizer import BytePairTokenizer, Encoder, fingerprint, token_dtype

if TYPE_CHECKING:
    import fastokens


@attrs.frozen(kw_only=True)
class Ranks:
    """A byte-pair encoding in a file, for processes that need not load it with tiktoken first."""

    path: Path  # lines of 'BASE64 RANK'
    vocabulary_size: int
    end_of_text_id: int


class FastBytePairEncoder:
    """The ids of a `BytePairTokenizer`, computed by fastokens."""

    def __init__(self, ranks: Ranks, encoding: "fastokens.Tokenizer"):
        self.vocabulary_size = ranks.vocabulary_size
        self.end_of_text_id = ranks.end_of_text_id
        self._dtype = token_dtype(ranks.vocabulary_size)
        self._encoding = encoding

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = self._encoding.encode_batch_flat(texts, split_special_tokens=True)
        lengths = np.diff(np.frombuffer(offsets, "<u8").astype(np.int64))
        return np.frombuffer(ids, "<u4").astype(self._dtype), lengths


def write_ranks(tokenizer: BytePairTokenizer, path: Path) -> None:
    """Write a tokenizer's ranks as tiktoken keeps them."""
    ranks = sorted(tokenizer.ranks().items(), key=lambda item: item[1])
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks))


def fast_encoder(ranks: Ranks, wanted_fingerprint: str) -> Encoder | None:
    """Return an encoder that does what the fingerprint tells, or None: not installed, or it gives other ids."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # the processes are the parallelism; read when the library is loaded
    try:
        import fastokens
    except ImportError:
        return None
    from tiktoken_ext.openai_public import r50k_pat_str  # GPT-2's pre-tokenization pattern

    special = {"<|endoftext|>": ranks.end_of_text_id}
    encoding = fastokens.Tokenizer.from_tiktoken(str(ranks.path), pattern=r50k_pat_str, special_tokens=special)
    encoder = FastBytePairEncoder(ranks, encoding)
    return encoder if fingerprint(encoder) == wanted_fingerprint else None
