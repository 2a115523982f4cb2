"""Keyed permutations: bijective, and as recorded, because the order of a run's data follows from them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokens.batches.permutation import mix, permute


def keys(key: int, count: int) -> np.ndarray:
    return np.full(count, key, np.uint64)


@given(st.integers(1, 2000), st.integers(0, 2**64 - 1))
def test_every_key_permutes_all_places(count: int, key: int) -> None:
    images = permute(np.arange(count), count, keys(key, count))
    assert sorted(images.tolist()) == list(range(count))


def test_each_place_is_permuted_by_its_own_key() -> None:
    both = np.array([1, 2], np.uint64)
    together = permute(np.array([3, 3]), 50, both)
    assert together.tolist() == [permute(np.array([3]), 50, both[:1])[0], permute(np.array([3]), 50, both[1:])[0]]
    assert together[0] != together[1]


def test_mixed_bits_change_with_every_bit_of_value_and_key() -> None:
    bits = np.uint64(1) << np.arange(64, dtype=np.uint64)
    start = mix(np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    for changed in (mix(bits, np.zeros(64, np.uint64)), mix(np.zeros(64, np.uint64), bits)):
        distances = [bin(int(value) ^ int(start[0])).count("1") for value in changed]
        assert min(distances) > 12
        assert 28 < np.mean(distances) < 36
