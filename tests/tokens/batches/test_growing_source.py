"""Growing token streams: a window is ready once all that it depends on is committed, as in the finished files."""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from common.errors import BadInput
from tokens.batches.growing_source import ENDLESS, GrowingSource
from tokens.batches.micro_batches import Reading, TokenSource, ready
from tokens.batches.mixture import Mixture, Stage
from tokens.batches.sampling import Layout, WindowOrder

CONTEXT, START, ERA = 4, 3, 5
STREAM: Any = None  # never read here


@attrs.define
class Preparation:
    """A growing directory: every look finds the next of these numbers of tokens; after the last it is finished."""

    commits: list[int]
    directory: Path = Path("tokens")
    finished: bool = False
    tokens: int = 0

    def committed(self, split: str) -> int:
        assert split == "train"
        return self.tokens

    def refresh(self) -> None:
        if self.commits:
            self.tokens = self.commits.pop(0)
        else:
            self.finished = True

    def progress(self) -> str:
        return ""


def growing(*commits: int, shuffle: bool = True, max_epochs: int = 1) -> GrowingSource:
    order = WindowOrder(count=ENDLESS, shuffle=shuffle, seed=1, era=ERA if shuffle else None)
    preparation = Preparation(list(commits))
    return GrowingSource(stream=STREAM, start_token=START, order=order, max_epochs=max_epochs, growing=preparation)


def tokens_of(windows: int) -> int:
    return START + windows * CONTEXT + 1


def test_without_shuffle_a_window_is_ready_with_its_last_target() -> None:
    source = growing(tokens_of(2), tokens_of(3) - 1, tokens_of(3), shuffle=False)
    assert source.ready(1, CONTEXT)
    assert not source.ready(2, CONTEXT)
    assert source.ready(2, CONTEXT)


def test_a_shuffled_window_is_ready_with_its_era() -> None:
    source = growing(tokens_of(4), tokens_of(5), tokens_of(6))
    assert not source.ready(0, CONTEXT)
    assert source.ready(0, CONTEXT)
    assert source.ready(4, CONTEXT)
    assert not source.ready(5, CONTEXT)


def test_windows_are_those_of_the_finished_files_before_and_after_the_end() -> None:
    finished = TokenSource(stream=STREAM, start_token=START, order=WindowOrder(count=12, shuffle=True, seed=1, era=ERA))
    source = growing(tokens_of(10), tokens_of(12), max_epochs=2)
    wanted = finished.first_tokens(np.arange(24), CONTEXT)
    assert source.ready(9, CONTEXT)
    assert source.first_tokens(np.arange(10), CONTEXT).tolist() == wanted[:10].tolist()  # two whole eras
    assert not source.ready(11, CONTEXT)
    assert source.ready(23, CONTEXT)  # finished, and its second epoch
    assert source.first_tokens(np.arange(24), CONTEXT).tolist() == wanted.tolist()


def test_a_stream_that_ended_too_early_is_named_with_what_to_do() -> None:
    source = growing(tokens_of(12), max_epochs=2)
    source.growing.refresh()
    source.growing.refresh()
    message = r"tokens: ended with 12 windows of 4 tokens, but the run wants more than 2 epochs of them; lower"
    with pytest.raises(BadInput, match=message):
        source.ready(24, CONTEXT)


def test_a_step_waits_only_for_growing_sources_that_it_reads() -> None:
    finished = TokenSource(stream=STREAM, start_token=0, order=WindowOrder(count=100, shuffle=False, seed=1))
    layout = Layout(context_length=CONTEXT, microbatch_size=2, accumulation=1, data_parallel_size=2)
    mixture = Mixture([Stage(0, (1, 0)), Stage(4, (1, 1))])
    source = growing(0, tokens_of(2), shuffle=False)
    reading = Reading(sources=(finished, source), mixture=mixture, layout=layout, vocabulary_size=9)
    assert reading.growing == [source]
    assert ready(reading, 0)
    assert not ready(reading, 1)
    assert ready(reading, 1)
