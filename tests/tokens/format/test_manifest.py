"""What a manifest says is held against the files beside it: damage is found by name, wherever it is."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import BadInput
from tokens.format.manifest import Content, open_listed, read_contents, read_manifest
from tokens.prepare.plan import read_plan

TOKENIZER = {"name": "bytes", "vocabulary_size": 257, "end_of_text_id": 256, "ranks_file": None}
SHARDS = [f"train-{index:05d}-of-00003.safetensors" for index in range(3)]


def prepared(directory: Path) -> dict[str, Any]:
    """Write a train stream in three shards, a whole validation file and their manifest; return the latter."""
    generator = np.random.default_rng(0)
    files = {}
    for name in (*SHARDS, "validation.safetensors"):
        values = generator.integers(0, 257, 10_000, dtype=np.uint16)
        save_file({"tokens": values}, directory / name)
        data = (directory / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        files[name] = {"size_bytes": len(data), "sha256": digest, "tokens": len(values), "max_id": int(values.max())}
    manifest = {"format": 1, "files": files, "documents": 1, "tokens": 40_000, "tokenizer": TOKENIZER, "sources": []}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def check(directory: Path) -> dict[str, Content]:
    """Look at a directory as the start of a run does."""
    manifest = read_manifest(directory)
    streams = [open_listed(directory, split, manifest) for split in ("train", "validation")]
    return read_contents([file for stream in streams for file in stream.files], manifest)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[12_345] ^= 1
    path.write_bytes(data)


def zero_a_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(bytes(4096))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


DAMAGE = {
    flip_a_bit: "damaged: got sha256 .*, wanted .* by manifest.json; prepare or download it again",
    zero_a_page: "damaged: got sha256 .*, wanted .* by manifest.json; prepare or download it again",
    truncate: "cut short or damaged: got .* bytes, wanted",
    Path.unlink: "missing, but manifest.json lists it; prepare or download it again",
}


def test_intact_files_are_what_their_manifest_says(tmp_path: Path) -> None:
    entries = prepared(tmp_path)["files"]
    contents = check(tmp_path)
    assert {name: (content.sha256, content.max_id) for name, content in contents.items()} == {
        name: (entry["sha256"], entry["max_id"]) for name, entry in entries.items()
    }
    (tmp_path / "manifest.json").unlink()
    assert check(tmp_path) == contents  # computed, not read from the manifest


@pytest.mark.parametrize("name", [SHARDS[0], SHARDS[2], "validation.safetensors"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[Path], None], name: str) -> None:
    prepared(tmp_path)
    damage(tmp_path / name)
    with pytest.raises(BadInput, match=f"{tmp_path / name}: {DAMAGE[damage]}"):
        check(tmp_path)


def test_a_file_of_another_preparation_is_named(tmp_path: Path) -> None:
    prepared(tmp_path)
    save_file({"tokens": np.zeros(9_000, np.uint16)}, tmp_path / SHARDS[1])
    with pytest.raises(BadInput, match=rf"{SHARDS[1]}: got \d+ bytes, wanted \d+ by manifest\.json"):
        check(tmp_path)


def test_a_split_that_is_not_read_may_be_missing(tmp_path: Path) -> None:
    prepared(tmp_path)
    (tmp_path / "validation.safetensors").unlink()
    assert open_listed(tmp_path, "train", read_manifest(tmp_path)).length == 30_000


def test_one_flipped_bit_in_a_manifest_is_one_clear_line_or_touches_nothing_that_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    prepared(tmp_path)
    good, intact = path.read_bytes(), read_manifest(tmp_path)
    assert intact is not None
    for place in range(len(good)):
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 8  # every bit of every byte takes 20 s
        path.write_bytes(damaged)
        try:
            manifest = read_manifest(tmp_path)
            assert manifest is not None, place
            if manifest.files != intact.files:
                check(tmp_path)
                pytest.fail(f"byte {place}")
        except BadInput as error:
            assert str(error).startswith(str(tmp_path)), place
            assert "\n" not in str(error), place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "damaged: wanted format 1, files and tokenizer"),
        ({"files": []}, "damaged: wanted format 1, files and tokenizer"),
        ({"files": {}}, "not listed in manifest.json"),
        ({"files": {"train.safetensors": {"size_bytes": "8"}}}, "files: train.safetensors: wanted size_bytes"),
        ({"tokenizer": {**TOKENIZER, "vocabulary_size": "257"}}, "damaged: tokenizer: wanted name"),
        (
            {"tokenizer": {**TOKENIZER, "ranks_file": "x.tiktoken"}},
            "ranks_file: got .x.tiktoken., wanted .tokenizer.",
        ),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    manifest = prepared(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(BadInput, match=f"{message}.*; prepare or download the tokens again, or delete manifest.json"):
        check(tmp_path)


def test_a_wrong_max_id_is_the_manifests_fault(tmp_path: Path) -> None:
    manifest = prepared(tmp_path)
    manifest["files"][SHARDS[0]]["max_id"] = 7
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match=rf"manifest\.json: damaged: its max_id of {SHARDS[0]} is not 256"):
        check(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\x00" * 4096, '{"a": ' * 100_000])
def test_a_manifest_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BadInput, match=r"manifest\.json: damaged: (not JSON|nested deeper than 100)"):
        read_manifest(tmp_path)


def test_a_file_of_that_name_that_is_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    for foreign in ([], {"files": 3}, {"format": 2}):
        (tmp_path / "manifest.json").write_text(json.dumps(foreign))
        assert read_manifest(tmp_path) is None


def test_content_is_read_in_blocks_whatever_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(100_000, dtype=np.uint32)
    save_file({"tokens": values}, tmp_path / "train.safetensors")
    files = open_listed(tmp_path, "train", None).files
    whole = read_contents(files, None)
    monkeypatch.setattr("tokens.format.manifest.BLOCK_BYTES", 4096)
    assert read_contents(files, None) == whole
    assert whole["train.safetensors"].max_id == 99_999
    assert whole["train.safetensors"].sha256 == hashlib.sha256(files[0].path.read_bytes()).hexdigest()


def test_ranks_beside_the_tokens_are_those_of_the_manifest(tmp_path: Path) -> None:
    manifest = prepared(tmp_path)
    ranks = tmp_path / "tokenizer.tiktoken"
    ranks.write_text("ranks")
    tokenizer = {**TOKENIZER, "ranks_file": ranks.name}
    for digest in ({}, {"ranks_sha256": hashlib.sha256(b"ranks").hexdigest()}):  # older manifests have none
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": tokenizer | digest}))
        check(tmp_path)
    ranks.write_text("Ranks")
    with pytest.raises(BadInput, match=r"tokenizer\.tiktoken: damaged: got sha256 .*, wanted .* by manifest\.json"):
        check(tmp_path)


@pytest.mark.parametrize("name", ["../secret.tiktoken", "/etc/hostname", "", "."])
def test_a_ranks_file_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    manifest = prepared(tmp_path)
    (tmp_path.parent / "secret.tiktoken").write_text("ranks")
    manifest["tokenizer"] = {**TOKENIZER, "ranks_file": name}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match=r"ranks_file: got '.*', wanted 'tokenizer\.tiktoken'"):
        check(tmp_path)


@pytest.mark.parametrize("read", [read_manifest, read_plan])
def test_a_directory_that_may_not_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BadInput, match=r"\.json: cannot be read: Permission denied; check"):
        read(tmp_path)
