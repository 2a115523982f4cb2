"""Token files are checked against their manifest, and damage anywhere is reported with the name of the file."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import BadInput
from tests.tokens.documents.reading import flipped
from tests.tokens.format.token_directory import SHARDS, check, prepared
from tokens.format.header import read_header, write_weighted
from tokens.format.manifest import has_split, open_listed, read_content, read_manifest

DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_bytes(flipped(path.read_bytes(), 12_345)), "damaged: got sha256 .*, wanted .*; prepare"),
    (lambda path: os.truncate(path, path.stat().st_size - 2), r"got \d+ bytes, wanted \d+ as manifest.json says"),
    (lambda path: save_file({"tokens": np.zeros(9_000, np.uint16)}, path), r"got \d+ bytes, wanted \d+ as manifest"),
    (Path.unlink, "missing, but manifest.json lists it; prepare or download it again"),
]


def test_intact_files_match_their_manifest(tmp_path: Path) -> None:
    entries = prepared(tmp_path)["files"]
    contents = check(tmp_path)
    expected = {name: (entry["sha256"], entry["max_id"]) for name, entry in entries.items()}
    assert {name: (content.sha256, content.max_id) for name, content in contents.items()} == expected
    (tmp_path / "manifest.json").unlink()
    assert check(tmp_path) == contents  # computed, not read from the manifest


@pytest.mark.parametrize("name", [SHARDS[2], "validation.safetensors"])
@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[Path], object], message: str, name: str) -> None:
    prepared(tmp_path)
    damage(tmp_path / name)
    with pytest.raises(BadInput, match=f"{tmp_path / name}: {message}"):
        check(tmp_path)
    if name not in SHARDS:  # the train split can be opened, because the damaged split is not read
        assert open_listed(tmp_path, "train", read_manifest(tmp_path)).length == 30_000


def test_a_wrong_max_id_is_blamed_on_the_manifest(tmp_path: Path) -> None:
    manifest = prepared(tmp_path)
    manifest["files"][SHARDS[0]]["max_id"] = 7
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match=rf"manifest\.json: damaged: its max_id for {SHARDS[0]} should be 256"):
        check(tmp_path)


def test_weights_do_not_count_as_ids_and_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokens.format.manifest.BLOCK_BYTES", 16)
    path, weights = tmp_path / "train.safetensors", np.ones(100)
    write_weighted(path, np.full(100, 3, "<u2"), weights, 10)
    content = read_content(read_header(path))
    assert (content.max_id, content.sha256) == (3, hashlib.sha256(path.read_bytes()).hexdigest())
    weights[77] = 2
    write_weighted(path, np.full(100, 3, "<u2"), weights, 10)
    with pytest.raises(BadInput, match=f"{path}: damaged: got a weight of 2, wanted 0 or 1; prepare it again"):
        read_content(read_header(path))


def test_shards_and_foreign_files_count_as_a_split(tmp_path: Path) -> None:
    assert not has_split(tmp_path, "train")
    (tmp_path / "train-00000-of-00002.safetensors").touch()
    (tmp_path / "train_other.safetensors").touch()
    assert has_split(tmp_path, "train")
    assert not has_split(tmp_path, "validation")
    (tmp_path / "tiny_val.bin").touch()
    assert has_split(tmp_path, "validation")
