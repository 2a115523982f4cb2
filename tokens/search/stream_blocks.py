"""Blocks of token streams, read and processed by one thread per core, because numpy releases Python's global lock."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from tokens.format.token_file import TokenStream

SEARCHED_TOKENS = 1 << 20  # tokens of a block; blocks are large because threads wait for each other between numpy calls
AHEAD = 2  # maximum number of blocks per thread that are queued, being processed, or waiting to be yielded
Result = TypeVar("Result")


def in_blocks(
    streams: Sequence[TokenStream], work: Callable[[np.ndarray], Result], overlap: int
) -> Iterator[tuple[int, Result]]:
    """Yield, in order, the position of each block's first token and the result of `work` on the block.

    Positions refer to the concatenation of all streams.

    A block also contains the first `overlap` tokens of the following block, or fewer if the stream ends before.
    Memory holds up to AHEAD + 1 blocks for each core that this process may use. Raises BadInput if a file can no longer
    be read.
    """

    def read(stream: TokenStream, start: int) -> Result:
        return work(stream.read(start, min(SEARCHED_TOKENS + overlap, stream.length - start)))

    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pending: deque[tuple[int, Future[Result]]] = deque()
    begin = 0  # position of the stream's first token in the concatenation of all streams
    with ThreadPoolExecutor(count) as threads:
        for stream in streams:
            for start in range(0, stream.length, SEARCHED_TOKENS):
                pending.append((begin + start, threads.submit(read, stream, start)))
                if len(pending) > AHEAD * count:
                    at, future = pending.popleft()
                    yield at, future.result()
            begin += stream.length
        for at, future in pending:
            yield at, future.result()


def common_dtype(streams: Sequence[TokenStream]) -> np.dtype:
    """Return a type that can hold the tokens of all streams."""
    return np.result_type(np.uint16, *(stream.dtype for stream in streams))


def locate(streams: Sequence[TokenStream], place: int) -> tuple[TokenStream, int]:
    """Return the stream that contains a token, and the token's position in that stream.

    `place` is the token's position in the concatenation of all streams.
    """
    for stream in streams:
        if place < stream.length:
            return stream, place
        place -= stream.length
    raise AssertionError(f"{place} tokens after the end of the last stream")
