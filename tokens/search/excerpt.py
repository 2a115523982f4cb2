"""Excerpts: tokens of a stream as text, with file, position and the text around them."""

from collections.abc import Sequence

from tokens.format.token_file import TokenStream
from tokens.search.stream_blocks import locate
from tokens.tokenizer.tokenizer import Tokenizer

AROUND = 10  # tokens shown before and after
SHOWN_TOKENS = 40  # tokens shown, at most: half of them from the beginning


def excerpt(streams: Sequence[TokenStream], place: int, length: int, tokenizer: Tokenizer) -> str:
    """Return the file of a run of tokens, its position there, and its text in brackets. `place`: as of `locate`."""
    stream, at = locate(streams, place)
    path, token = stream.file_at(at)
    end = at + length
    edges = [at, end] if length <= SHOWN_TOKENS else [at, at + SHOWN_TOKENS // 2, end - SHOWN_TOKENS // 2, end]

    def text(begin: int, end: int) -> str:
        return tokenizer.decode(stream.read(begin, end - begin).tolist())

    run = " ... ".join(text(*edges[k : k + 2]) for k in range(0, len(edges), 2))
    before, after = text(max(0, at - AROUND), at), text(end, min(stream.length, end + AROUND))
    return f"{path}, token {token:,}: {before}[{run}]{after}"
