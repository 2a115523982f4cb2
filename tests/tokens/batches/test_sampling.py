"""Every window is read exactly once, with any world size and accumulation, and wherever a run stops."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tokens.batches.micro_batches import MicroBatch
from tokens.batches.sampling import (
    Layout,
    WindowOrder,
    balance,
    idle_micro_steps,
    longest_share,
    rank_samples,
    rank_shares,
    read_windows,
    window_count,
)
from tokens.format.token_file import open_split


def layouts(global_batch: int, microbatch: int) -> list[Layout]:
    count = global_batch // microbatch
    return [
        Layout(context_length=8, microbatch_size=microbatch, microbatches=count, data_parallel_size=size)
        for size in range(1, count + 1)
    ]


def samples_of_step(layout: Layout, step: int) -> list[int]:
    return [
        sample
        for rank in range(layout.data_parallel_size)
        for micro_batch in rank_samples(layout, step, 1, rank)[0, idle_micro_steps(layout, rank) :].tolist()
        for sample in micro_batch
    ]


@given(st.integers(1, 4), st.sampled_from([1, 2, 4, 6, 8, 12]), st.integers(0, 50))
def test_data_parallel_size_does_not_change_a_steps_windows(microbatch: int, count: int, step: int) -> None:
    global_batch = microbatch * count
    expected_samples = list(range(step * global_batch, (step + 1) * global_batch))
    for layout in layouts(global_batch, microbatch):
        assert samples_of_step(layout, step) == expected_samples


def test_idle_micro_steps_repeat_the_first_micro_batch() -> None:
    layout = Layout(context_length=8, microbatch_size=1, microbatches=8, data_parallel_size=3)
    assert [rank_samples(layout, 0, 1, rank).ravel().tolist() for rank in range(3)] == [[0, 0, 1], [2, 3, 4], [5, 6, 7]]
    assert [idle_micro_steps(layout, rank) for rank in range(3)] == [1, 0, 0]
    assert (layout.accumulation, layout.even, layout.global_batch_size) == (3, False, 8)


@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 5), st.integers(0, 2**30))
def test_a_shuffle_is_a_permutation_in_every_epoch(count: int, seed: int, source: int, epoch: int) -> None:
    order = WindowOrder(count=count, shuffle=True, seed=seed, source=source)
    windows = order.windows(epoch * count + np.arange(count))
    assert sorted(windows.tolist()) == list(range(count))
    place = seed % count
    # A position has the same window if it is looked up alone.
    assert order.windows(np.array([epoch * count + place])) == windows[place]


@pytest.mark.parametrize(
    ("count", "seed", "windows"),
    [
        (1, 42, [0]),
        (7, 42, [6, 0, 2, 3, 5, 4, 1]),
        (1000, 42, [193, 703, 288, 226, 614, 290, 461, 813]),
        (1000, 2**70 + 3, [43, 701, 398, 735, 893, 824, 453, 811]),
        (3_000_000, 7, [109412, 1675574, 1182098, 2766560, 2063707, 2725612, 2555952, 2983703]),
    ],
)
def test_the_first_epoch_keeps_its_recorded_order(count: int, seed: int, windows: list[int]) -> None:
    order = WindowOrder(count=count, shuffle=True, seed=seed)
    assert order.windows(np.arange(len(windows))).tolist() == windows


def test_a_shuffle_depends_on_seed_source_and_epoch() -> None:
    places = np.arange(10_000)
    first, *other_orders = [
        WindowOrder(count=10_000, shuffle=True, seed=seed, source=source).windows(places + epoch * 10_000)
        for seed, source, epoch in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 2, 0), (1, 0, 1), (1, 0, 2), (1, 1, 1))
    ]
    orders = [first, *other_orders]
    for number, order in enumerate(orders):
        assert all((order == earlier_order).mean() < 0.01 for earlier_order in orders[:number])
        assert abs(np.corrcoef(places, order)[0, 1]) < 0.05  # windows and their positions hardly correlate
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05  # nor do consecutive windows


def test_without_shuffle_the_streams_order_is_kept() -> None:
    order = WindowOrder(count=5, shuffle=False, seed=1)
    assert order.windows(np.arange(12)).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("extra", [0, 1, 7, 8, 9])
def test_targets_are_the_inputs_shifted_by_one(tmp_path: Path, extra: int) -> None:
    save_file({"tokens": np.arange(40 + extra, dtype=np.uint16)}, tmp_path / "train.safetensors")
    stream = open_split(tmp_path, "train")
    count = window_count(stream.length, 3, 8)
    assert count == (40 + extra - 3 - 1) // 8
    parts = [(stream, 3 + window * 8) for window in range(count)]
    batch = MicroBatch.of_windows(read_windows(parts, 8))
    inputs, targets = batch.inputs, batch.targets
    assert inputs.flatten().tolist() == list(range(3, 3 + 8 * count))
    assert targets.flatten().tolist() == list(range(4, 4 + 8 * count))


@given(st.integers(1, 600), st.data())
def test_shares_cover_all_micro_batches_evenly(microbatches: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, microbatches))
    shares = rank_shares(microbatches, ranks)
    assert [number for share in shares for number in share] == list(range(microbatches))
    lengths = {len(share) for share in shares}
    assert len(shares) == ranks and 0 not in lengths
    assert max(lengths) == longest_share(microbatches, ranks) == -(-microbatches // ranks)
    assert balance(microbatches, ranks) == pytest.approx(microbatches / ranks / max(lengths))
    if microbatches % ranks == 0:
        assert lengths == {microbatches // ranks}


@pytest.mark.parametrize(
    ("microbatches", "ranks", "ends"),
    [
        (8, 3, [2, 5, 8]),
        (8, 6, [2, 4, 5, 6, 7, 8]),
        (12, 5, [3, 6, 9, 11, 12]),  # multiples of three
        (7, 3, [3, 6, 7]),
    ],
)
def test_shares_end_at_large_subtrees(microbatches: int, ranks: int, ends: list[int]) -> None:
    assert [share.stop for share in rank_shares(microbatches, ranks)] == ends
