"""Search of a token stream for 13-grams: a plain numpy pass beside tokens/search on one core and on two, in turn.

    python benchmarks/ngram_search.py --stream token_files/fineweb --items hellaswag_val.jsonl --tokens 100000000

The stream is DIR's train split, repeated to a length, with 200 random 13-grams written into it and into the items. Each
way must find those, and the same others as the plain pass. That is one thread over blocks of 2^17 tokens: uint64 hashes
of 1, 2, 4, 8, 12 and 13 tokens at every token, each by one multiplication from those before; then the bit filter of
tokens/search, binary search of the hashes that pass, exact comparison.
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
BLOCK = 1 << 17  # the fastest of 2^14 to 2^19 here
BASE = np.uint64(0x9E3779B97F4A7C15)


def main(
    *, stream: Path, items: Path, tokens: int = 100_000_000, cores: tuple[int, ...] = (1, 2), rounds: int = 7
) -> None:
    """Print tokens/s of each way, medians over rounds, and the ratio to the plain pass of the same round."""
    manifest = read_manifest(stream)
    tokenizer = recorded_tokenizer(manifest.tokenizer, stream) if manifest else load_tokenizer("gpt2")
    whole = open_comparable(stream, "train", tokenizer)
    text = np.resize(whole.read(0, min(whole.length, tokens)), tokens)
    draw = np.random.default_rng(0)
    planted = draw.integers(0, tokenizer.vocabulary_size, (PLANTED, GRAM)).astype(text.dtype)
    places = np.sort(draw.choice(tokens // GRAM, PLANTED, replace=False)) * GRAM
    text.reshape(-1)[places[:, None] + np.arange(GRAM)] = planted
    sequences = [ids for _, _, found in read_items(items, tokenizer) for item in found for ids in item]
    ngrams = Ngrams([*sequences, *planted], GRAM, text.dtype)
    with tempfile.TemporaryDirectory() as folder:
        save_file({"tokens": text}, Path(folder, "train.safetensors"))
        written = open_split(Path(folder), "train")
        finder = NgramFinder(ngrams)
        ways: dict[str, Callable[[], np.ndarray]] = {"plain numpy": partial(PlainPass(ngrams).places, written)}
        ways |= {f"tokens/search, {count} cores": partial(searched, finder, written, count) for count in (1, 2)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            found = {name: timed(way, seconds[name]) for name, way in ways.items()}
            for name, got in found.items():
                if not np.array_equal(got, found["plain numpy"]):
                    raise BadInput(f"{name}: found {len(got):,} places, other ones than the plain pass")
    assert np.isin(places, found["plain numpy"]).all(), "a planted n-gram is missing"
    hits = len(found["plain numpy"])
    print(
        f"{tokens:,} tokens, {ngrams.count:,} n-grams; all {PLANTED} planted found, and {hits - PLANTED:,} other places"
    )
    rows = []
    for name, each in seconds.items():
        ratios = [one / other for one, other in zip(seconds["plain numpy"], each, strict=True)]
        rows.append([name, f"{tokens / statistics.median(each) / 1e6:.0f}", f"{statistics.median(ratios):.2f}"])
    print(bench.table(["way", "M tokens/s", "ratio"], rows))


def timed(way: Callable[[], np.ndarray], seconds: list[float]) -> np.ndarray:
    begun = time.perf_counter()
    found = way()
    seconds.append(time.perf_counter() - begun)
    return found


def searched(finder: NgramFinder, stream: TokenStream, cores: int) -> np.ndarray:
    available = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(available)[:cores])  # threads that begin now
    try:
        return np.concatenate([places + at for at, (places, _) in in_blocks([stream], finder.find, GRAM - 1)])
    finally:
        os.sched_setaffinity(0, available)


class PlainPass:
    """Search by the hash of each 13 tokens."""

    def __init__(self, ngrams: Ngrams):
        grams = ngrams.tokens[ngrams.firsts[:, None] + np.arange(GRAM)]
        self.hashes, first = np.unique(hashes_of_13(grams.reshape(-1))[::GRAM], return_index=True)
        assert len(first) == len(grams), "two n-grams of one hash"
        self.grams, self.filter = grams[first], BitFilter(self.hashes)

    def places(self, stream: TokenStream) -> np.ndarray:
        """Return the places of all n-grams in a stream, ascending."""
        found = []
        for at in range(0, stream.length - GRAM + 1, BLOCK):
            block = stream.read(at, min(BLOCK + GRAM - 1, stream.length - at))
            hashes = hashes_of_13(block)
            kept = self.filter.possible_members(hashes)
            first = np.minimum(np.searchsorted(self.hashes, hashes[kept]), len(self.hashes) - 1)
            exact = (block[kept[:, None] + np.arange(GRAM)] == self.grams[first]).all(1)
            found.append(kept[exact] + at)
        return np.concatenate(found)


def hashes_of_13(tokens: np.ndarray) -> np.ndarray:
    """Return the polynomial hash of each 13 tokens, modulo 2^64."""
    powers = BASE ** np.arange(5, dtype=np.uint64)
    one = tokens.astype(np.uint64)
    two = one[:-1] * powers[1] + one[1:]
    four = two[:-2] * powers[2] + two[2:]
    eight = four[:-4] * powers[4] + four[4:]
    twelve = eight[:-4] * powers[4] + four[8:]
    return twelve[:-1] * powers[1] + one[12:]


if __name__ == "__main__":
    bench.run(main)
