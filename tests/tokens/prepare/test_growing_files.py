"""Shards contain the tokens of a single file, cut at the requested length. They are read as one stream."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.errors import BadInput
from tests.conftest import slow
from tests.tokens.preparing import files_of, jsonl, write
from tokens.format.manifest import open_listed, read_manifest
from tokens.format.token_file import open_split

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jsonl(tmp_path_factory.mktemp("source") / "a.jsonl", [f"document {number}" for number in range(400)])


def stream(directory: Path, split: str) -> np.ndarray:
    tokens = open_split(directory, split)
    return tokens.read(0, tokens.length)


@pytest.mark.parametrize("shard_tokens", [*slow(7), 13, 100, 1000, 4839, 10_000])
@pytest.mark.parametrize("kind", ["hash", "tail"])
def test_shards_have_the_requested_length(source: Path, tmp_path: Path, kind: str, shard_tokens: int) -> None:
    options = {"split": kind, "validation_fraction": 0.1, "test_fraction": 0.05, "unit_bytes": 700}
    write(tmp_path / "whole", source, **options)
    manifest = write(tmp_path / "shards", source, shard_tokens=shard_tokens, **options)
    for split in SPLITS:
        expected_tokens = stream(tmp_path / "whole", split)
        lengths = [file.length for file in open_split(tmp_path / "shards", split).files]
        assert stream(tmp_path / "shards", split).tolist() == expected_tokens.tolist()
        assert lengths[:-1] == [shard_tokens] * (
            len(expected_tokens) // shard_tokens - (len(expected_tokens) % shard_tokens == 0)
        )
        assert 0 < lengths[-1] <= shard_tokens
        assert (f"{split}.safetensors" in manifest.files) == (len(expected_tokens) <= shard_tokens)
        open_listed(tmp_path / "shards", split, read_manifest(tmp_path / "shards"))
    assert set(manifest.files) == set(files_of(tmp_path / "shards"))
    assert not list((tmp_path / "shards").glob(".partial*"))


@pytest.mark.parametrize(("shard", "damage"), [(0, Path.unlink), (1, lambda path: path.write_bytes(b"cut"))])
def test_a_damaged_shard_is_named_before_writing(
    source: Path, tmp_path: Path, shard: int, damage: Callable[[Path], object]
) -> None:
    out = tmp_path / "out"
    write(out, source, shard_tokens=1000)
    (out / "manifest.json").unlink()  # as if the preparation had been interrupted
    [path] = out.glob(f"train-{shard:05d}-of-*")
    damage(path)
    files_before = files_of(out)
    with pytest.raises(BadInput, match=rf"\.partial-train-{shard:05d}\.safetensors: got .* bytes, wanted 6,096"):
        write(out, source, shard_tokens=1000)
    assert sorted(files_of(out).values()) == sorted(files_before.values())
