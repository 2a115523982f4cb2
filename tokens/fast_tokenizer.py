"""A faster byte-pair encoding, where it is installed and found to do what tiktoken does."""

import base64
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokens.tokenizer import BytePairTokenizer, Tokenizer, fingerprint, token_dtype

if TYPE_CHECKING:
    import fastokens


class FastBytePairTokenizer:
    """The ids of a `BytePairTokenizer`, computed by fastokens."""

    def __init__(self, exact: BytePairTokenizer, encoding: "fastokens.Tokenizer"):
        self.name = exact.name
        self.vocabulary_size = exact.vocabulary_size
        self.end_of_text_id = exact.end_of_text_id
        self.ranks_file = exact.ranks_file
        self.decode = exact.decode
        self._dtype = token_dtype(exact.vocabulary_size)
        self._encoding = encoding

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = self._encoding.encode_batch_flat(texts, split_special_tokens=True)
        lengths = np.diff(np.frombuffer(offsets, "<u8").astype(np.int64))
        return np.frombuffer(ids, "<u4").astype(self._dtype), lengths


def accelerated(tokenizer: Tokenizer) -> tuple[Tokenizer, str]:
    """Return the fastest tokenizer that does the same as the given one, and what computes it.

    Without fastokens, or where its result on a probe differs in one id, that is the given one.
    """
    if not isinstance(tokenizer, BytePairTokenizer):
        return tokenizer, tokenizer.name
    # One thread a process: the workers are the parallelism. Read when the library is loaded.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    try:
        import fastokens
    except ImportError:
        return tokenizer, "tiktoken (fastokens, an optional package, is several times faster)"
    from tiktoken_ext.openai_public import r50k_pat_str

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.tiktoken"
        ranks = sorted(tokenizer.ranks().items(), key=lambda item: item[1])
        path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks))
        special = {"<|endoftext|>": tokenizer.end_of_text_id}
        encoding = fastokens.Tokenizer.from_tiktoken(str(path), pattern=r50k_pat_str, special_tokens=special)
    fast = FastBytePairTokenizer(tokenizer, encoding)
    if fingerprint(fast) != fingerprint(tokenizer):
        return tokenizer, "tiktoken (the installed fastokens gives other tokens)"
    return fast, "fastokens"
