"""Packing: items are put into rows by best fit, and never divided."""

import itertools
import random

import hypothesis
import hypothesis.strategies as some

from tokens.prepare.packing import pack


@hypothesis.given(some.lists(some.integers(1, 20), max_size=40))
def test_every_item_is_packed_once_within_the_row_length(lengths: list[int]) -> None:
    rows = pack(lengths, 20)
    assert sorted(itertools.chain.from_iterable(rows)) == [*range(len(lengths))]
    assert all(sum(lengths[index] for index in row) <= 20 for row in rows)
    assert rows == sorted(sorted(row) for row in rows) == pack(lengths, 20)
    full = [sum(lengths[index] for index in row) for row in rows]
    # No two rows could be joined.
    assert all(first + second > 20 for first, second in itertools.combinations(full, 2) if min(first, second))


def test_an_item_goes_where_it_fits_best() -> None:
    assert pack([6, 7, 4, 3], 10) == [[0, 2], [1, 3]]
    assert pack([10, 1, 10], 10) == [[0], [1], [2]]
    assert pack([], 10) == []


def test_padding_is_rare() -> None:
    draw = random.Random(0)
    lengths = [min(1024, 1 + int(draw.lognormvariate(5.3, 0.8))) for _ in range(20_000)]
    assert sum(lengths) / (1024 * len(pack(lengths, 1024))) > 0.998
