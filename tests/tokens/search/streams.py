"""Token streams with given tokens, and simple searches of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tokens.format.token_file import TokenStream, open_split

DTYPES = st.sampled_from([np.uint16, np.uint32])
FEW = st.integers(1, 3).flatmap(lambda ids: st.lists(st.integers(0, ids), max_size=60))  # tokens that repeat often
SHARDS = st.lists(FEW, min_size=1, max_size=3)  # shards of a stream


def write_streams(
    directory: Path, streams: Sequence[Sequence[Sequence[int]]], dtypes: Iterable[type]
) -> list[TokenStream]:
    """Write streams, each consisting of shards of tokens, and open them."""
    opened = []
    for number, (shards, dtype) in enumerate(zip(streams, dtypes, strict=False)):
        folder = directory / f"{len([*directory.iterdir()])}-{number}"
        folder.mkdir()
        for index, shard in enumerate(shards):
            name = f"train-{index:05d}-of-{len(shards):05d}" if len(shards) > 1 else "train"
            save_file({"tokens": np.array(shard, dtype)}, folder / f"{name}.safetensors")
        opened.append(open_split(folder, "train"))
    return opened


def joined(shards: Sequence[Sequence[int]]) -> list[int]:
    return [token for shard in shards for token in shard]


def grams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """Return the n-grams of tokens, in order."""
    return [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
