"""Token files for tests: a directory with a manifest, files in other formats, and the check that a run makes."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from common.errors import BadInput
from tokens.format.manifest import Content, Manifest, open_listed, read_contents, read_manifest

TOKENIZER = {"name": "bytes", "vocabulary_size": 257, "end_of_text_id": 256, "ranks_file": None}
SHARDS = [f"train-{index:05d}-of-00003.safetensors" for index in range(3)]


def prepared(directory: Path) -> dict[str, Any]:
    """Write a train stream in three shards, a single validation file and their manifest; return the manifest."""
    generator = np.random.default_rng(0)
    files = {}
    for name in (*SHARDS, "validation.safetensors"):
        values = generator.integers(0, 257, 10_000, dtype=np.uint16)
        save_file({"tokens": values}, directory / name)
        data = (directory / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        measured = {"size_bytes": len(data), "sha256": digest, "max_id": int(values.max())}
        files[name] = {**measured, "tokens": len(values), "dtype": "uint16"}
    manifest = {"format": 1, "files": files, "documents": 1, "tokens": 40_000, "tokenizer": TOKENIZER, "sources": []}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def contents_of(manifest: Manifest | None) -> list[tuple[str, int, str, int]]:
    assert manifest is not None
    return [(name, entry.size_bytes, entry.sha256, entry.max_id) for name, entry in manifest.files.items()]


def check(directory: Path) -> dict[str, Content]:
    """Check a directory as a run does when it starts."""
    manifest = read_manifest(directory)
    streams = [open_listed(directory, split, manifest) for split in ("train", "validation")]
    return read_contents([file for stream in streams for file in stream.files], manifest)


def check_flips(path: Path, bits: Iterable[int], read: Callable[[], object], named: Path | None = None) -> None:
    """Flip each of the given bits in turn, and check what `read` does with the damaged file.

    `read` must return the same as before, or raise a one-line error that begins with the path `named`. By default,
    `named` is `path`.
    """
    good, intact = path.read_bytes(), read()
    for bit in bits:
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert read() == intact, bit
        except BadInput as error:
            assert str(error).startswith(str(named or path)) and "\n" not in str(error), bit


def save(path: Path, values: np.ndarray, name: str = "tokens") -> Path:
    path.parent.mkdir(exist_ok=True)
    save_file({name: values}, path)
    return path


LLM_C = {2: (20240520, 1), 4: (20240801, 7)}  # magic number and version, by bytes per token


def write_llm_c(path: Path, tokens: np.ndarray) -> None:
    """Write a shard in llm.c's format: version 1 with uint16 tokens, version 7 with uint32 tokens."""
    header = np.zeros(256, "<i4")
    header[:3] = (*LLM_C[tokens.itemsize], len(tokens))
    path.write_bytes(header.tobytes() + tokens.tobytes())


def write_nanogpt(path: Path, tokens: np.ndarray) -> None:
    path.write_bytes(tokens.astype("<u2").tobytes())
