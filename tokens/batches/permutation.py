"""Pseudo-random permutations of 0 .. count - 1, any element by itself: a Feistel network keyed by 64 bits.

Arrays are of uint64, which wrap around silently; single numbers would warn.
"""

import numpy as np

FEISTEL_ROUNDS = 6
WORD = 1 << 64
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # and those of its finalizer


def permute(places: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Return the image of each place 0 .. count - 1 under the permutation of its key, int64."""
    # Cycle walking: a Feistel network permutes 0 .. 4^k - 1; a place outside 0 .. count - 1 is permuted again.
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    windows = _feistel(places.astype(np.uint64), half_bits, keys)
    while (outside := np.flatnonzero(windows >= count)).size:
        windows[outside] = _feistel(windows[outside], half_bits, keys[outside])
    return windows.astype(np.int64)


def mix(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return 64 well-mixed bits of each value and key: two rounds of SplitMix64's finalizer (Steele et al. 2014)."""
    mixed = values + (keys + np.uint64(1)) * GOLDEN
    for _ in range(2):
        mixed ^= mixed >> np.uint64(30)
        mixed *= MULTIPLIERS[0]
        mixed ^= mixed >> np.uint64(27)
        mixed *= MULTIPLIERS[1]
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> half, values & mask
    for round_number in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mix(right, keys * np.uint64(FEISTEL_ROUNDS) + np.uint64(round_number)) & mask)
    return left << half | right
