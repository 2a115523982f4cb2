"""Near-duplicates: with any block size, copies of a template are found, and other documents are not."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.tokens.search.streams import grams, write_streams
from tokens.search import near_duplicates as module
from tokens.search import stream_blocks
from tokens.search.near_duplicates import SIMILARITY, near_duplicates

END = 50_256


def families(count: int, share: float, seed: int) -> list[list[int]]:
    """Make `count` templates. Return three documents from each, with a share of the template's tokens replaced."""
    draw = np.random.default_rng(seed)
    documents = []
    for template in draw.integers(0, 40_000, (count, 300)):
        for _ in range(3):
            filled = np.where(draw.random(300) < share, draw.integers(0, 40_000, 300), template)
            documents.append(filled.tolist())
    return documents


def similarity(first: list[int], second: list[int]) -> float:
    return len({*grams(first, 5)} & {*grams(second, 5)}) / len({*grams(first, 5)} | {*grams(second, 5)})


@pytest.mark.parametrize("block", [301, 7000, 1 << 20])
def test_filled_in_templates_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(stream_blocks, "SEARCHED_TOKENS", block)
    draw = np.random.default_rng(1)
    unrelated = [draw.integers(0, 40_000, size).tolist() for size in draw.integers(1, 600, 200)]
    documents = [*families(10, 0.01, 2), *unrelated, [], [7, 8], [7, 8], unrelated[3]]
    # Documents with the same number in `kinds` should be found as near-duplicates.
    kinds = [*np.repeat(np.arange(10), 3).tolist(), *range(10, 213), 13]
    order = [number for number in draw.permutation(len(documents)).tolist() if documents[number]]
    halves = [[token for number in half for token in [*documents[number], END]] for half in (order[:99], order[99:])]
    streams = write_streams(tmp_path, [[halves[0][:999], halves[0][999:]], [halves[1][:-1]]], [np.uint16, np.uint32])
    duplicates = near_duplicates(streams, END)
    assert duplicates.lengths.tolist() == [len(documents[number]) for number in order]
    shuffled = [kinds[number] for number in order]
    assert duplicates.originals.tolist() == [shuffled.index(kind) for kind in shuffled]
    for value, first, second in duplicates.pairs:
        assert value == similarity(documents[order[first]], documents[order[second]]) >= SIMILARITY
    assert len(duplicates.pairs) == module.KEPT_PAIRS


def test_near_duplicates_are_found_at_the_promised_rate(tmp_path: Path) -> None:
    documents = families(400, 0.028, 3)
    tokens = [token for document in documents for token in [*document, END]]
    duplicates = near_duplicates(write_streams(tmp_path, [[tokens]], [np.uint16]), END)
    pairs = [(similarity(documents[at], documents[at + 1]), at) for at in range(0, len(documents), 3)]
    near = [(value, at) for value, at in pairs if 0.6 <= value < 0.75]
    missed = [at for _, at in near if duplicates.originals[at + 1] != duplicates.originals[at]]
    assert len(near) > 100 and len(missed) <= 0.06 * len(near)
    assert all(duplicates.originals[at] // 3 == at // 3 for at in range(len(documents)))


@pytest.mark.slow
def test_memory_is_about_250_bytes_per_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_blocks, "SEARCHED_TOKENS", 1 << 14)
    peaks = []
    for count in (1 << 13, 1 << 16):
        tokens = np.full((count, 12), END)
        tokens[:, :11] = np.random.default_rng(0).integers(0, 50_000, (count, 11))
        streams = write_streams(tmp_path, [[tokens.reshape(-1).tolist()]], [np.uint16])
        tracemalloc.start()
        assert len(near_duplicates(streams, END).originals) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / ((1 << 16) - (1 << 13)) < 260, peaks
