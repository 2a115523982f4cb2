"""Runs on other programs' token files: the same tokens give the same bits in any format; an error names a bad file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.conftest import MakeRun, complete, metrics, one_line, train, write_run
from tests.tokens.format.token_directory import write_llm_c, write_nanogpt
from tokens.format.token_file import open_split

KEYS: dict[str, Any] = {"min_train_tokens": 2 * 8 * 32, "shuffle": True}  # two steps
CUTS = (100, 4_000, 4_001)  # the tokens at which new shards begin
# For each format: the names of its files, the function that writes a file, the dtype of the tokens, and whether to cut
# the tokens into shards
FORMATS: dict[str, tuple[str, Callable[[Path, np.ndarray], Any], str, bool]] = {
    "llm.c version 1": ("tiny_{}.bin", write_llm_c, "<u2", False),
    "llm.c version 1 in shards": ("tiny_{}_{:06d}.bin", write_llm_c, "<u2", True),
    "llm.c version 7 in shards": ("tiny_{}_{:06d}.bin", write_llm_c, "<u4", True),
    "nanoGPT": ("{}.bin", write_nanogpt, "<u2", False),
    "npy": ("{}.npy", np.save, "<u4", False),
    "npy in shards": ("tiny_{}_{:06d}.npy", np.save, "<u2", True),
    "safetensors": ("{}.safetensors", lambda path, ids: save_file({"tokens": ids}, path), "<u4", False),
}


def tokens(token_files: Path) -> dict[str, np.ndarray]:
    """Return the tokens of each split. The keys, "train" and "val", name the splits as other programs do."""
    streams = {word: open_split(token_files, split) for word, split in (("train", "train"), ("val", "validation"))}
    return {word: stream.read(0, stream.length) for word, stream in streams.items()}


def write_tokens(place: Path, token_files: Path, name: str) -> Path:
    """Write a directory's tokens to a new directory in another format, and return the new directory."""
    pattern, write_file, kind, in_shards = FORMATS[name]
    (directory := place / "tokens").mkdir()
    for split, ids in tokens(token_files).items():
        word = "validation" if name == "safetensors" and split == "val" else split
        for number, part in enumerate(np.split(ids.astype(kind), CUTS if in_shards else [])):
            write_file(directory / pattern.format(word, number), part)
    return directory


def outcome(run: Path) -> tuple[dict[int, float], dict[int, float]]:
    complete(run, "--hash-every", "1")
    return metrics(run, "state_sha256"), metrics(run, "validation_loss")


@pytest.fixture(scope="module")
def prepared(token_files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], dict[int, float]]:
    """The state hashes and validation losses of the same run on token files from prepare_data.py."""
    return outcome(write_run(tmp_path_factory.mktemp("prepared") / "run", token_files, **KEYS))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if index < 2 else pytest.mark.slow) for index, name in enumerate(FORMATS)]
)
def test_the_same_tokens_in_any_format_give_the_same_bits(
    make_run: MakeRun, token_files: Path, tmp_path: Path, prepared: object, name: str
) -> None:
    results = outcome(make_run(dataset=str(write_tokens(tmp_path, token_files, name)), **KEYS))
    assert results == prepared
    assert len(results[0]) == 2 and len(results[1]) == 2


def test_unusable_token_files_are_named(make_run: MakeRun, token_files: Path, tmp_path: Path) -> None:
    directory = write_tokens(tmp_path, token_files, "llm.c version 1 in shards")
    run = make_run(dataset=str(directory), **KEYS)
    shard = directory / "tiny_train_000003.bin"
    good = shard.read_bytes()
    shard.write_bytes(good[:1024] + b"\x00\x02" + good[1026:])
    assert f"{shard}: token 0: got id 512, wanted less than vocab_size 257" in one_line(train(run))
    shard.write_bytes(good[:-2])
    damaged = f"{shard}: truncated or damaged: got {len(good) - 2} bytes, wanted {len(good)};"
    for options in ((), ("--dry-run",)):
        assert damaged in one_line(train(run, *options))
    shard.rename(directory / "tiny_000003.bin")
    assert f"{directory}/tiny_000003.bin: cannot tell its split; put exactly one of" in one_line(train(run))


def test_runs_on_foreign_shards_notice_changes(
    make_run: MakeRun, token_files: Path, tmp_path: Path, prepared: tuple[dict[int, float], dict[int, float]]
) -> None:
    directory = write_tokens(tmp_path, token_files, "npy in shards")
    run = make_run(dataset=str(directory), **KEYS)
    complete(run, "--max-steps", "1")
    shard = directory / "tiny_train_000002.npy"
    good = shard.read_bytes()
    shard.write_bytes(good[:-2] + b"\x01\x00")
    assert f"{shard}: damaged, or not the file that" in train(run).stderr
    shard.write_bytes(good)
    process = train(run, "--hash-every", "1")
    assert "resuming from" in process.stdout
    assert metrics(run, "state_sha256")[2] == prepared[0][2]
