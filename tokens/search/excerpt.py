"""Excerpts: tokens of a stream as text, with their file, their position and the surrounding text."""

from collections.abc import Sequence

from tokens.format.token_file import TokenStream
from tokens.search.stream_blocks import locate
from tokens.tokenizer.tokenizer import Tokenizer

AROUND = 10  # tokens shown before and after the excerpt
SHOWN_TOKENS = 40  # tokens shown at most; half of them are from the beginning


def excerpt(streams: Sequence[TokenStream], place: int, length: int, tokenizer: Tokenizer) -> str:
    """Return the file of a run of tokens, its position in the file, and its text in brackets.

    `place` is the run's first token, counted through all streams as in `locate`.
    """
    stream, start = locate(streams, place)
    path, token = stream.file_at(start)
    end = start + length
    edges = [start, end] if length <= SHOWN_TOKENS else [start, start + SHOWN_TOKENS // 2, end - SHOWN_TOKENS // 2, end]

    def text(begin: int, end: int) -> str:
        return tokenizer.decode(stream.read(begin, end - begin).tolist())

    run = " ... ".join(text(*edges[k : k + 2]) for k in range(0, len(edges), 2))
    before, after = text(max(0, start - AROUND), start), text(end, min(stream.length, end + AROUND))
    return f"{path}, token {token:,}: {before}[{run}]{after}"
