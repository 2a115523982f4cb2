"""Overlaps are the same as in a simple search, also across the borders of files and blocks."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import BadInput
from tests.tokens.format.token_directory import prepared
from tests.tokens.gpt2 import tiktokens
from tests.tokens.search.streams import DTYPES, FEW, SHARDS, grams, joined, write_streams
from tokens.search import overlap, stream_blocks
from tokens.search.overlap import NOWHERE, documents, find_overlap, forms, open_comparable
from tokens.tokenizer.loading import load_tokenizer

quick = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(st.lists(SHARDS, min_size=1, max_size=2), st.lists(st.lists(FEW, max_size=3), max_size=6), st.data())
def test_overlap_equals_a_plain_search(
    tmp_path: Path, streams: list[list[list[int]]], items: list[list[list[int]]], data: st.DataObject
) -> None:
    opened = write_streams(tmp_path, streams, data.draw(st.tuples(DTYPES, DTYPES)))
    n, joined_streams = data.draw(st.integers(1, 20)), [joined(shards) for shards in streams]
    items += [[joined_streams[0][5:40]], [joined_streams[-1][:4], joined_streams[-1][:n]]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_blocks, "SEARCHED_TOKENS", data.draw(st.integers(1, 70)))
        patch.setattr(overlap, "PASS_TOKENS", data.draw(st.integers(1, 100)))
        patch.setattr(overlap, "LEAST", least := data.draw(st.integers(1, 9)))
        matches = find_overlap(opened, [[np.array(sequence) for sequence in item] for item in items], n)
    starts = np.cumsum([0, *map(len, joined_streams)]).tolist()
    for item, length, place in zip(items, matches.lengths.tolist(), matches.places.tolist(), strict=True):
        longest = max(map(len, item), default=0)
        assert (length == 0) == (longest < min(n, least)) and (length == n) == (longest >= n)
        searched = [sequence for sequence in item if len(sequence) >= least] if longest < n else item
        expected_grams = {
            gram for sequence in searched for gram in grams(sequence, n if longest >= n else len(sequence))
        }
        expected_places = [
            start + at
            for size in {len(gram) for gram in expected_grams}
            for start, tokens in zip(starts, joined_streams, strict=False)
            for at, gram in enumerate(grams(tokens, size))
            if gram in expected_grams
        ]
        assert place == min(expected_places, default=NOWHERE)


def test_empty_items_and_streams_are_allowed(tmp_path: Path) -> None:
    opened = write_streams(tmp_path, [[[]], [[1, 2, 3]]], [np.uint16, np.uint16])
    assert find_overlap(opened, []).touched.tolist() == []
    assert find_overlap([], [[np.arange(20)]]).touched.tolist() == [False]
    assert find_overlap(opened, [[], [np.zeros(0, np.uint16)], [np.arange(12)]]).touched.tolist() == [False] * 3


def test_documents_end_where_their_range_ends(tmp_path: Path) -> None:
    [stream] = write_streams(tmp_path, [[[9, 1, 2, 9, 9, 3], [4, 9, 5]]], [np.uint32])
    assert [document.tolist() for [document] in documents(stream, 9)] == [[1, 2], [3, 4], [5]]
    assert [document.tolist() for [document] in documents(stream, 9, 2, 4)] == [[2], [3]]


def test_the_second_form_matches_text_inside_a_sentence() -> None:
    tokenizer = tiktokens()
    text, inside = "walls of the old town", tokenizer.encode("The walls of the old town are high.").tolist()
    first, second = (ids.tolist() for ids in forms(tokenizer, text))
    assert tuple(second) in grams(inside, len(second)) and tuple(first) not in grams(inside, len(first))


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    prepared(tmp_path)
    assert open_comparable(tmp_path, "train", load_tokenizer("bytes")).length == 30_000
    record = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(record.replace('"name": "bytes"', '"name": "bytes", "fingerprint": "0"'))
    with pytest.raises(BadInput, match="its tokenizer bytes gives different ids than bytes, so the tokens are not"):
        open_comparable(tmp_path, "train", load_tokenizer("bytes"))
