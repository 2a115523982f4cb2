"""Excerpts: tokens of a stream as text, with their file, their position and the surrounding text."""

from collections.abc import Sequence

from tokens.format.token_file import TokenStream
from tokens.search.stream_blocks import locate
from tokens.tokenizer.tokenizer import Tokenizer

AROUND = 10  # tokens shown before and after the excerpt
SHOWN_TOKENS = 40  # maximum number of tokens shown: half from the beginning, half from the end


def excerpt(streams: Sequence[TokenStream], place: int, length: int, tokenizer: Tokenizer) -> str:
    """Describe a run of tokens: the file that contains it, its position there, and its text in brackets.

    `place` is the position of the run's first token in the concatenation of all streams.
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
