"""N-grams are found in a block exactly where a simple search finds them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokens.search.streams import DTYPES, FEW, grams
from tokens.search import ngrams as module
from tokens.search.ngrams import BitFilter, NgramFinder, Ngrams


def check(sequences: list[list[int]], block: list[int], n: int, dtype: type) -> int:
    """Check that the places found in a block are those of a simple search, and return their number."""
    ngrams = Ngrams([np.array(sequence, np.int64) for sequence in sequences], n, np.dtype(dtype))
    expected_grams = {gram for sequence in sequences for gram in grams(sequence, n)}
    assert ngrams.count == len(expected_grams)
    tokens: np.ndarray = np.array(block, dtype)
    places, numbers = NgramFinder(ngrams).find(tokens)
    assert places.tolist() == [at for at, gram in enumerate(grams(block, n)) if gram in expected_grams]
    for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
        start = int(ngrams.starts[ngrams.numbers == number][0])
        assert ngrams.tokens[start : start + n].tolist() == block[place : place + n]
    return len(places)


@given(st.lists(FEW, max_size=4), FEW, st.integers(1, 20), DTYPES)
def test_matches_equal_a_plain_search(sequences: list[list[int]], block: list[int], n: int, dtype: type) -> None:
    check(sequences, block, n, dtype)
    check([*sequences, block[3:50]], block, n, dtype)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_exactly_the_planted_n_grams_are_found(dtype: type) -> None:
    draw = np.random.default_rng(0)
    block = draw.integers(0, 50_000, 1 << 17)
    planted = draw.integers(0, 50_000, (200, 13))
    places = np.sort(draw.choice(len(block) // 13, 200, replace=False)) * 13
    block[places[:, None] + np.arange(13)] = planted
    absent_sequences = draw.integers(0, 50_000, (2000, 40))  # the block contains no run of 13 of these random ids
    assert check([*planted.tolist(), *absent_sequences.tolist()], block.tolist(), 13, dtype) == 200


def test_hash_collisions_do_not_change_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = module._factors
    zeros = {0: np.zeros, 1: np.ones}  # with seed 1, a hash is the sum of the words
    monkeypatch.setattr(
        module, "_factors", lambda n, seed: zeros.get(seed, lambda n, _: factors(n, seed))(n, np.uint64)
    )
    for sequences, seed in (([[1, 2, 3], [3, 2, 2]], 1), ([[1, 2, 3], [0, 3, 2]], 2)):
        assert Ngrams([*map(np.array, sequences)], 3, np.dtype(np.uint16)).seed == seed
        assert check(sequences, [0, 3, 2, 2, 1, 2, 3, 1], 3, np.uint16) == 2


def test_oversized_ids_match_nothing() -> None:
    ngrams = Ngrams([np.arange(65_536 - 14, 65_536 + 20), np.arange(65_536, 65_549)], 13, np.dtype(np.uint16))
    assert (ngrams.count, ngrams.starts.tolist(), ngrams.sequences.tolist()) == (2, [0, 1], [0, 0])
    block = np.concatenate([np.arange(13), np.arange(65_536 - 14, 65_536)]).astype(np.uint16)
    assert NgramFinder(ngrams).find(block)[0].tolist() == [13, 14]


def test_a_filter_has_all_its_hashes_and_few_others() -> None:
    hashes = np.random.default_rng(0).integers(0, 1 << 64, 1_000_000, np.uint64)
    members = BitFilter(hashes[:100_000]).possible_members(hashes)
    assert members[:100_000].tolist() == [*range(100_000)]
    assert len(members) < 125_000
