"""Prefetch: micro-batches arrive in order, errors in the thread reach training, and waiting time is counted."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import BadInput
from tokens.batches.micro_batches import MicroBatch
from training import prefetch
from training.parallel.process_group import Ranks
from training.prefetch import MICROBATCHES_AHEAD, Feed


def feed_of(monkeypatch: pytest.MonkeyPatch, read: Any) -> Feed:
    """Return a feed whose thread reads from a generator that the test provides."""
    monkeypatch.setattr(
        prefetch, "micro_batches", lambda reading, rank, steps, wait: read(steps.start, steps.stop, wait)
    )
    unused: Any = None
    return Feed(unused, 0, torch.device("cpu"), range(3, 20), unused)


def batch(number: int) -> MicroBatch:
    return MicroBatch(torch.tensor([number]), torch.tensor([number + 1]), torch.tensor([0.5]), 0.5)


def test_micro_batches_arrive_in_order_with_limited_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers_read: list[int] = []

    def numbers(first: int, end: int, _: Any) -> Iterator[MicroBatch]:
        for number in range(first, end):
            numbers_read.append(number)
            yield batch(number)

    feed = feed_of(monkeypatch, numbers)
    try:
        batches = [feed.next() for _ in range(5)]
        assert batches == [batch(number) for number in range(3, 8)]
        assert len(numbers_read) <= 5 + MICROBATCHES_AHEAD + 1  # the last one waits for room in the queue
    finally:
        feed.close()
    assert not feed._thread.is_alive()


def test_error_in_the_thread_is_raised_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(first: int, *_: Any) -> Iterator[MicroBatch]:
        yield batch(first)
        raise BadInput("token 7: got id 300, wanted less than vocab_size 257")

    feed = feed_of(monkeypatch, failing)
    feed.next()
    with pytest.raises(BadInput, match="token 7: got id 300"):
        feed.next()
    feed.close()


def test_waiting_time_for_data_is_counted(monkeypatch: pytest.MonkeyPatch, alone: Ranks) -> None:
    may_read = threading.Event()

    def slow(first: int, *_: Any) -> Iterator[MicroBatch]:
        may_read.wait()
        time.sleep(0.3)
        yield batch(first)

    feed = feed_of(monkeypatch, slow)
    may_read.set()
    feed.next()
    first_wait = feed.waited_seconds
    assert first_wait > 0.1
    monkeypatch.setattr(prefetch, "ready", lambda *_: False)
    growing_tokens: Any = SimpleNamespace(abandoned=lambda: time.sleep(0.1))
    feed._reading = SimpleNamespace(growing=[growing_tokens])  # type: ignore[assignment]
    assert not feed.wait_for_tokens(4, alone, lambda: True)  # because a stop was requested
    assert feed.waited_seconds >= first_wait + 0.1
    feed.close()


def test_feed_waiting_for_tokens_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "ready", lambda *_: False)

    def growing(first: int, end: int, wait_for: Any) -> Iterator[MicroBatch]:
        wait_for(first)
        yield batch(first)

    feed = feed_of(monkeypatch, growing)
    feed.close()
    assert not feed._thread.is_alive()
