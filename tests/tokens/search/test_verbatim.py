"""Verbatim runs of a text are the same as in a simple search from every pair of positions."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tokens.search.streams import DTYPES, FEW, SHARDS, joined, write_streams
from tokens.search import stream_blocks, verbatim
from tokens.search.verbatim import verbatim_runs

Run = tuple[int, int, int, int]  # start, length, place, copies


def plain(streams: list[list[int]], text: list[int], n: int) -> list[Run]:
    longest_runs: dict[int, list[int]] = {}
    begin = 0
    for tokens in streams:
        for start in range(len(text)):
            for at in range(len(tokens)):
                if start and at and tokens[at - 1] == text[start - 1]:
                    continue  # the run begins earlier
                same = [
                    text_token == stream_token
                    for text_token, stream_token in zip(text[start:], tokens[at:], strict=False)
                ]
                length = [*same, False].index(False)
                if length >= max(n, longest_runs.get(start, [0])[0] + 1):
                    longest_runs[start] = [length, begin + at, 0]
                if length >= n:
                    longest_runs[start][2] += length == longest_runs[start][0]
        begin += len(tokens)
    runs = [(start, *longest_runs[start]) for start in sorted(longest_runs)]
    return [run for run in runs if all(run is longer or not within(run, longer) for longer in runs)]  # type: ignore[arg-type,misc]


def within(run: Run, longer: Run) -> bool:
    return longer[0] <= run[0] and run[0] + run[1] <= longer[0] + longer[1]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SHARDS, min_size=1, max_size=2), FEW, st.data())
def test_verbatim_runs_equal_a_plain_search(
    tmp_path: Path, streams: list[list[list[int]]], text: list[int], data: st.DataObject
) -> None:
    opened, n = write_streams(tmp_path, streams, data.draw(st.tuples(DTYPES, DTYPES))), data.draw(st.integers(1, 14))
    joined_streams = [joined(shards) for shards in streams]
    text += joined_streams[0][data.draw(st.integers(0, 40)) :][:50]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_blocks, "SEARCHED_TOKENS", data.draw(st.integers(1, 70)))
        patch.setattr(verbatim, "PAIRS_AT_ONCE", data.draw(st.integers(1, 60)))
        runs = verbatim_runs(opened, np.array(text, np.int64), n)
    assert [(run.start, run.length, run.place, run.copies) for run in runs] == plain(joined_streams, text, n)
