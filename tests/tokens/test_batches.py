"""Every window is read exactly once, whatever the world size, the accumulation and where a run stops."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tokens.batches import Layout, WindowOrder, microbatch_places, read_windows, window_count
from tokens.token_file import open_split


def layouts(global_batch: int, microbatch: int) -> list[Layout]:
    count = global_batch // microbatch
    return [
        Layout(context_length=8, microbatch_size=microbatch, accumulation=count // world, world_size=world)
        for world in range(1, count + 1)
        if count % world == 0
    ]


def places_of_step(layout: Layout, step: int) -> list[int]:
    return [
        place
        for rank in range(layout.world_size)
        for micro_step in range(layout.accumulation)
        for place in microbatch_places(layout, step, micro_step, rank)
    ]


@given(st.integers(1, 4), st.sampled_from([1, 2, 4, 6, 8, 12]), st.integers(0, 50))
def test_every_world_size_reads_the_same_windows_in_a_step(microbatch: int, count: int, step: int) -> None:
    global_batch = microbatch * count
    wanted = list(range(step * global_batch, (step + 1) * global_batch))
    for layout in layouts(global_batch, microbatch):
        assert places_of_step(layout, step) == wanted


def test_a_run_reads_every_window_once_even_when_the_world_size_changes() -> None:
    choices = layouts(24, 2)
    read = [place for step in range(30) for place in places_of_step(choices[step % len(choices)], step)]
    assert sorted(read) == list(range(24 * 30))


@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_a_shuffle_is_a_permutation(count: int, seed: int) -> None:
    order = WindowOrder(count=count, shuffle=True, seed=seed)
    assert sorted(order.window(place) for place in range(count)) == list(range(count))


def test_a_shuffle_depends_on_the_seed_and_leaves_no_trace_of_the_order() -> None:
    orders = [WindowOrder(count=10_000, shuffle=True, seed=seed) for seed in (1, 2)]
    first, second = (np.array([order.window(place) for place in range(10_000)]) for order in orders)
    assert (first == second).mean() < 0.01
    places = np.arange(10_000)
    assert abs(np.corrcoef(places, first)[0, 1]) < 0.05  # against where it stood
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05  # against its neighbour


def test_without_shuffle_the_stream_keeps_its_order() -> None:
    order = WindowOrder(count=5, shuffle=False, seed=1)
    assert [order.window(place) for place in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("extra", [0, 1, 7, 8, 9])
def test_inputs_and_targets_are_the_stream_and_the_stream_one_later(tmp_path: Path, extra: int) -> None:
    save_file({"tokens": np.arange(40 + extra, dtype=np.uint16)}, tmp_path / "train.safetensors")
    stream = open_split(tmp_path, "train")
    count = window_count(stream.length, 3, 8)
    assert count == (40 + extra - 3 - 1) // 8
    inputs, targets = read_windows(stream, 3, list(range(count)), 8)
    assert inputs.flatten().tolist() == list(range(3, 3 + 8 * count))
    assert targets.flatten().tolist() == list(range(4, 4 + 8 * count))
