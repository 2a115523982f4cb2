"""Excerpts: tokens of a stream as text, with their file and position, and what stands around them."""

from collections.abc import Sequence

import numpy as np

from tokens.format.token_file import TokenStream
from tokens.search.stream_blocks import locate
from tokens.tokenizer.tokenizer import Tokenizer

AROUND = 10  # tokens shown before and after
SHOWN = 40  # tokens shown, at most


def excerpt(streams: Sequence[TokenStream], place: int, length: int, tokenizer: Tokenizer) -> str:
    """Return the file of a run of tokens, its position there, and its text in brackets. `place`: as of `locate`."""
    stream, at = locate(streams, place)
    begin, end = max(0, at - AROUND), min(stream.length, at + length + AROUND)
    run = shortened(stream.read(at, length), tokenizer)
    before, after = (tokenizer.decode(stream.read(a, b - a).tolist()) for a, b in ((begin, at), (at + length, end)))
    path, token = stream.file_at(at)
    return f"{path}, token {token:,}: {before}[{run}]{after}"


def shortened(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return the text of ids (1-D), without those in the middle of more than SHOWN."""
    parts = [ids] if len(ids) <= SHOWN else [ids[: SHOWN // 2], ids[-SHOWN // 2 :]]
    return " ... ".join(tokenizer.decode(part.tolist()) for part in parts)
