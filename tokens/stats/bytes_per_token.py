"""Bytes per token of a tokenizer beside GPT-2's, on the same text: a sample of a token stream, decoded."""

import itertools
from pathlib import Path

import numpy as np

from common.errors import BadInput
from tokens.format.manifest import TokenizerRecord
from tokens.format.token_file import TokenStream
from tokens.tokenizer.known import recognized
from tokens.tokenizer.loading import load_tokenizer, recorded_tokenizer

SAMPLE_BLOCKS = 16  # spread evenly over the stream, at most
SAMPLE_BLOCK_TOKENS = 1 << 16


def compare_with_gpt2(stream: TokenStream, record: TokenizerRecord, directory: Path) -> list[str]:
    """Return a line that compares the tokenizer of a directory with GPT-2's; none if it is that."""
    try:
        own = recorded_tokenizer(record, directory)
        if recognized(own.ranks()) == "gpt2":
            return []
        gpt2 = load_tokenizer("gpt2")
    except BadInput as error:
        problem = str(error).replace("pass a local ranks file (--tokenizer FILE.tiktoken) or ", "")
        return [f"  beside GPT-2         not compared: {problem}"]
    text_bytes = tokens = gpt2_tokens = 0
    count = min(SAMPLE_BLOCK_TOKENS, stream.length)
    starts = np.linspace(0, stream.length - count, min(SAMPLE_BLOCKS, -(-stream.length // count))).astype(int)
    for ids in (stream.read(start, count) for start in starts.tolist()):
        edges = np.flatnonzero(np.isin(ids, [*own.special_tokens.values()])).tolist()
        for begin, end in itertools.pairwise([-1, *edges, count]):
            text = own.decode(ids[begin + 1 : end].tolist())
            text_bytes += len(text.encode(errors="replace"))
            tokens += end - begin - 1
            gpt2_tokens += len(gpt2.encode(text))
    return [
        f"  beside GPT-2         {text_bytes / max(1, tokens):.2f} bytes per token, GPT-2's "
        f"{text_bytes / max(1, gpt2_tokens):.2f}, on {text_bytes:,} bytes of the same text"
    ]
