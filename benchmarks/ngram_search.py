"""Searching a token stream for 13-grams: a plain numpy pass compared with tokens/search on one core and on two cores.

    python benchmarks/ngram_search.py --stream token_files/fineweb --items hellaswag_val.jsonl --tokens 100000000

The stream is the train split of --stream, repeated up to --tokens, with 200 random 13-grams written into it and into
the items. All methods must find the planted 13-grams and, in addition, the same matches as the plain pass. The methods
take turns.

The plain pass runs in one thread over blocks of 2^17 tokens. It computes uint64 hashes of the next 1, 2, 4, 8, 12 and
13 tokens at each position. Each longer hash is computed from shorter hashes with one multiplication. The plain pass
then uses the bit filter of tokens/search, a binary search for the hashes that pass the filter, and an exact comparison.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bench
import numpy as np
from safetensors.numpy import save_file

from common.errors import BadInput
from tokens.format.manifest import read_manifest
from tokens.format.token_file import TokenStream, open_split
from tokens.search.ngrams import BitFilter, NgramFinder, Ngrams
from tokens.search.overlap import GRAM, open_comparable
from tokens.search.stream_blocks import in_blocks
from tokens.stats.contamination import read_items
from tokens.tokenizer.loading import load_tokenizer, recorded_tokenizer

PLANTED = 200
BLOCK = 1 << 17  # tokens; on our machine, the fastest of the sizes from 2^14 to 2^19
BASE = np.uint64(0x9E3779B97F4A7C15)


def main(
    *, stream: Path, items: Path, tokens: int = 100_000_000, cores: tuple[int, ...] = (1, 2), rounds: int = 7
) -> None:
    """Print each method's tokens/s, and the ratio to the plain pass of the same round, both as medians over rounds."""
    manifest = read_manifest(stream)
    tokenizer = recorded_tokenizer(manifest.tokenizer, stream) if manifest else load_tokenizer("gpt2")
    train_stream = open_comparable(stream, "train", tokenizer)
    text = np.resize(train_stream.read(0, min(train_stream.length, tokens)), tokens)
    random = np.random.default_rng(0)
    planted = random.integers(0, tokenizer.vocabulary_size, (PLANTED, GRAM)).astype(text.dtype)
    positions = np.sort(random.choice(tokens // GRAM, PLANTED, replace=False)) * GRAM
    text.reshape(-1)[positions[:, None] + np.arange(GRAM)] = planted
    sequences = [ids for _, _, item_ids in read_items(items, tokenizer) for item in item_ids for ids in item]
    ngrams = Ngrams([*sequences, *planted], GRAM, text.dtype)
    with tempfile.TemporaryDirectory() as folder:
        save_file({"tokens": text}, Path(folder, "train.safetensors"))
        planted_stream = open_split(Path(folder), "train")
        finder = NgramFinder(ngrams)
        methods: dict[str, Callable[[], np.ndarray]] = {
            "plain numpy": partial(PlainPass(ngrams).positions, planted_stream)
        }
        methods |= {f"tokens/search, {count} cores": partial(search, finder, planted_stream, count) for count in (1, 2)}
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(rounds):
            matches = {name: time_search(method, seconds[name]) for name, method in methods.items()}
            for name, match_positions in matches.items():
                if not np.array_equal(match_positions, matches["plain numpy"]):
                    raise BadInput(f"{name}: its {len(match_positions):,} matches differ from the plain pass's matches")
    assert np.isin(positions, matches["plain numpy"]).all(), "a planted n-gram is missing"
    hits = len(matches["plain numpy"])
    print(f"{tokens:,} tokens, {ngrams.count:,} n-grams; found all {PLANTED} planted ones and {hits - PLANTED:,} more")
    rows = []
    for name, method_seconds in seconds.items():
        ratios = [plain / search for plain, search in zip(seconds["plain numpy"], method_seconds, strict=True)]
        speed = tokens / statistics.median(method_seconds) / 1e6
        rows.append([name, f"{speed:.0f}", f"{statistics.median(ratios):.2f}"])
    print(bench.table(["method", "M tokens/s", "ratio"], rows))


def time_search(method: Callable[[], np.ndarray], seconds: list[float]) -> np.ndarray:
    """Return the matches of a method, and append its time to `seconds`."""
    began = time.perf_counter()
    matches = method()
    seconds.append(time.perf_counter() - began)
    return matches


def search(finder: NgramFinder, stream: TokenStream, cores: int) -> np.ndarray:
    """Return the positions of all n-grams in a stream, as found by tokens/search on the given number of cores."""
    available = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(available)[:cores])  # the search starts its threads later, on these cores
    try:
        return np.concatenate([positions + at for at, (positions, _) in in_blocks([stream], finder.find, GRAM - 1)])
    finally:
        os.sched_setaffinity(0, available)


class PlainPass:
    """The plain search, which uses the hashes of all sequences of 13 tokens."""

    def __init__(self, ngrams: Ngrams):
        grams = ngrams.tokens[ngrams.firsts[:, None] + np.arange(GRAM)]
        self.hashes, first = np.unique(hashes_of_13(grams.reshape(-1))[::GRAM], return_index=True)
        assert len(first) == len(grams), "two n-grams have the same hash"
        self.grams, self.filter = grams[first], BitFilter(self.hashes)

    def positions(self, stream: TokenStream) -> np.ndarray:
        """Return the positions of all n-grams in a stream, ascending."""
        matches = []
        for at in range(0, stream.length - GRAM + 1, BLOCK):
            block = stream.read(at, min(BLOCK + GRAM - 1, stream.length - at))
            hashes = hashes_of_13(block)
            candidates = self.filter.possible_members(hashes)
            first = np.minimum(np.searchsorted(self.hashes, hashes[candidates]), len(self.hashes) - 1)
            exact = (block[candidates[:, None] + np.arange(GRAM)] == self.grams[first]).all(1)
            matches.append(candidates[exact] + at)
        return np.concatenate(matches)


def hashes_of_13(tokens: np.ndarray) -> np.ndarray:
    """Return the polynomial hashes, modulo 2^64, of all sequences of 13 tokens."""
    powers = BASE ** np.arange(5, dtype=np.uint64)
    # Hashes of 1, 2, 4, 8 and 12 tokens.
    hash1 = tokens.astype(np.uint64)
    hash2 = hash1[:-1] * powers[1] + hash1[1:]
    hash4 = hash2[:-2] * powers[2] + hash2[2:]
    hash8 = hash4[:-4] * powers[4] + hash4[4:]
    hash12 = hash8[:-4] * powers[4] + hash4[8:]
    return hash12[:-1] * powers[1] + hash1[12:]


if __name__ == "__main__":
    bench.run(main)
