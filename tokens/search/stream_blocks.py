"""Blocks of token streams, read and worked on by threads, one a core: numpy leaves the interpreter to the others."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from tokens.format.token_file import TokenStream

SEARCHED_TOKENS = 1 << 20  # a block: large: threads wait for each other between numpy's loops
AHEAD = 2  # blocks of a thread, finished or not
Result = TypeVar("Result")


def in_blocks(
    streams: Sequence[TokenStream], work: Callable[[np.ndarray], Result], overlap: int
) -> Iterator[tuple[int, Result]]:
    """Yield the first token of each block and its result of `work`, in order; a stream begins where one ends.

    A block has `overlap` more tokens, with which the next one begins, as far as the stream has them. Memory: AHEAD + 1
    blocks a core that this process may use. Raises BadInput for a file that cannot be read any more.
    """

    def read(stream: TokenStream, start: int) -> Result:
        return work(stream.read(start, min(SEARCHED_TOKENS + overlap, stream.length - start)))

    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pending: deque[tuple[int, Future[Result]]] = deque()
    begin = 0  # of the stream, among the tokens of all
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
    """Return the type that holds the tokens of all streams."""
    return np.result_type(np.uint16, *(stream.dtype for stream in streams))


def locate(streams: Sequence[TokenStream], place: int) -> tuple[TokenStream, int]:
    """Return the stream of a token, numbered among those of all streams, and its position there."""
    for stream in streams:
        if place < stream.length:
            return stream, place
        place -= stream.length
    raise AssertionError(f"{place} tokens after the last one")
