"""Micro-batches of a mixture: a step has the same samples on any number of ranks, and an epoch reads each window once.

A window of a growing stream is ready when everything that determines it is committed. Its tokens are then the same as
in the finished files.
"""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from common.errors import BadInput
from tokens.batches import micro_batches as room
from tokens.batches.micro_batches import ENDLESS, Reading, TokenSource, micro_batches, ready
from tokens.batches.mixture import Mixture, Stage
from tokens.batches.sampling import Layout, WindowOrder, window_count
from tokens.format.token_file import open_split

CONTEXT, START, ERA = 4, 3, 5
STEPS = 12
GLOBAL_BATCH = 8
LENGTHS = {"a": 165, "b": 46, "c": 90_000}  # from token 3 on, "a" has 40 windows, "b" has 10, and "c" has many
STAGES = [Stage(0, (3, 1, 0)), Stage(5 * GLOBAL_BATCH, (1, 0, 1)), Stage(8 * GLOBAL_BATCH, (1, 2, 1))]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenSource, ...]:
    """Three streams, of uint16 and uint32; each token encodes its stream and its position."""
    token_sources = []
    for number, (name, length) in enumerate(LENGTHS.items()):
        folder = tmp_path_factory.mktemp(name)
        dtype = np.uint32 if name == "c" else np.uint16
        save_file({"tokens": np.arange(length, dtype=dtype) + dtype(1000 * number)}, folder / "train.safetensors")
        order = WindowOrder(count=window_count(length, 3, CONTEXT), shuffle=True, seed=5, source=number)
        token_sources.append(TokenSource(stream=open_split(folder, "train"), start_token=3, order=order))
    return tuple(token_sources)


def reading_of(sources: tuple[TokenSource, ...], size: int, vocabulary_size: int = 100_000) -> Reading:
    layout = Layout(context_length=CONTEXT, microbatch_size=2, microbatches=GLOBAL_BATCH // 2, data_parallel_size=size)
    return Reading(sources=sources, mixture=Mixture(STAGES), layout=layout, vocabulary_size=vocabulary_size)


def read_steps(reading: Reading, first_step: int = 0) -> Tensor:
    """Return the inputs of all ranks, (steps, G, T)."""
    ranks = []
    for rank in range(reading.layout.data_parallel_size):
        batches = list(micro_batches(reading, rank, range(first_step, STEPS)))
        assert all(torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1]) for batch in batches)
        ranks.append(torch.cat([batch.inputs for batch in batches]).unflatten(0, (STEPS - first_step, -1)))
    return torch.cat(ranks, dim=1)


def test_steps_do_not_depend_on_ranks_or_resumption(sources: tuple[TokenSource, ...]) -> None:
    alone = read_steps(reading_of(sources, 1))
    for size in (2, 4):
        assert torch.equal(read_steps(reading_of(sources, size)), alone)
    for first_step in range(STEPS):
        assert torch.equal(read_steps(reading_of(sources, 2), first_step), alone[first_step:])


def test_block_size_does_not_change_batches(sources: tuple[TokenSource, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    expected_steps = read_steps(reading_of(sources, 1))
    for ahead in (1, 8, 24, 40):
        monkeypatch.setattr(room, "SAMPLES_AHEAD", ahead)
        assert torch.equal(read_steps(reading_of(sources, 1)), expected_steps)


def test_each_epoch_reads_every_window_once(sources: tuple[TokenSource, ...]) -> None:
    read = read_steps(reading_of(sources, 1)).flatten(0, 1)[:, 0].tolist()
    of_b = [(first - 1000 - 3) // CONTEXT for first in read if 1000 <= first < 1000 + LENGTHS["b"]]
    # b gets 1/4 of the 40 samples in the first 5 steps, and 1/2 of the 32 samples in the last 4 steps.
    assert len(of_b) == 10 + 16
    first, second, third = of_b[:10], of_b[10:20], of_b[20:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert len(set(third)) == 6
    assert first != second


def test_an_id_outside_the_vocabulary_names_its_step(sources: tuple[TokenSource, ...]) -> None:
    with pytest.raises(BadInput, match=r"step \d+: .*b0/train\.safetensors: token \d+: got id 10\d\d, wanted less"):
        list(micro_batches(reading_of(sources, 2, vocabulary_size=1010), 1, range(STEPS)))


STREAM: Any = None  # this stream is never read


@attrs.define
class Preparation:
    """A growing directory. Each refresh sets its number of tokens to the next number in `commits`.

    If no number is left, a refresh finds that the files are finished.
    """

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


def growing(*commits: int, shuffle: bool = True, max_epochs: int = 1) -> TokenSource:
    order = WindowOrder(count=ENDLESS, shuffle=shuffle, seed=1, era=ERA if shuffle else None)
    preparation = Preparation(list(commits))
    return TokenSource(stream=STREAM, start_token=START, order=order, max_epochs=max_epochs, growing=preparation)


def tokens_of(windows: int) -> int:
    return START + windows * CONTEXT + 1


def test_growing_and_finished_files_give_the_same_windows() -> None:
    finished = TokenSource(stream=STREAM, start_token=START, order=WindowOrder(count=12, shuffle=True, seed=1, era=ERA))
    source = growing(tokens_of(10), tokens_of(12), max_epochs=2)
    expected_tokens = finished.first_tokens(np.arange(24), CONTEXT)
    assert source.ready(9, CONTEXT)
    assert source.first_tokens(np.arange(10), CONTEXT).tolist() == expected_tokens[:10].tolist()  # two complete eras
    assert not source.ready(11, CONTEXT)
    assert source.ready(23, CONTEXT)  # the files are finished; this is the second epoch
    assert source.first_tokens(np.arange(24), CONTEXT).tolist() == expected_tokens.tolist()


def test_an_error_about_a_short_stream_gives_advice() -> None:
    source = growing(tokens_of(12), max_epochs=2)
    assert source.growing is not None
    source.growing.refresh()
    source.growing.refresh()
    message = "tokens: the preparation ended with 12 windows of 4 tokens, but the run with max_epochs 2 needs more; "
    with pytest.raises(BadInput, match=message):
        source.ready(24, CONTEXT)


def test_a_step_waits_only_for_sources_it_reads() -> None:
    finished = TokenSource(stream=STREAM, start_token=0, order=WindowOrder(count=100, shuffle=False, seed=1))
    layout = Layout(context_length=CONTEXT, microbatch_size=2, microbatches=2, data_parallel_size=2)
    mixture = Mixture([Stage(0, (1, 0)), Stage(4, (1, 1))])
    source = growing(0, tokens_of(2), shuffle=False)
    reading = Reading(sources=(finished, source), mixture=mixture, layout=layout, vocabulary_size=9)
    assert reading.growing == [source.growing]
    assert ready(reading, 0)
    assert not ready(reading, 1)
    assert ready(reading, 1)
