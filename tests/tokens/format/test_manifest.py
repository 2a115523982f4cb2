"""A manifest that is damaged or inconsistent is refused with a one-line error."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from common.checks import structured
from common.errors import BadInput
from tests.tokens.format.token_directory import TOKENIZER, check, check_flips, contents_of, prepared
from tokens.format.manifest import TokenizerRecord, read_manifest
from tokens.prepare.plan import read_plan


def test_a_flipped_manifest_bit_is_reported_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    prepared(tmp_path)
    intact = contents_of(read_manifest(tmp_path))

    def read() -> list[Any]:
        contents = contents_of(read_manifest(tmp_path))
        if contents != intact:
            check(tmp_path)
        return contents

    # Flip one bit of each byte, because flipping all bits would take 20 s.
    bits = [8 * place + place % 8 for place in range(path.stat().st_size)]
    check_flips(path, bits, read, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "damaged: format: got 2, wanted 1"),
        ({"files": []}, "damaged: files: got .., wanted an object"),
        ({"files": {}}, "not listed in manifest.json"),
        ({"files": {"train.safetensors": {"size_bytes": "8"}}}, "size_bytes: got '8', wanted an int"),
        ({"tokenizer": {**TOKENIZER, "vocabulary_size": "257"}}, "tokenizer.vocabulary_size: got '257', wanted an int"),
        *(
            ({"tokenizer": {**TOKENIZER, "ranks_file": name}}, f"ranks_file: got '{name}', wanted 'tokenizer.tiktoken'")
            for name in ("x.tiktoken", "../secret.tiktoken", "/etc/hostname", "")
        ),
        (
            {"tokenizer": {**TOKENIZER, "structure": "{}"}},
            "tokenizer: structure: got '{}', wanted the JSON text of an object",
        ),
    ],
)
def test_an_inconsistent_manifest_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    manifest = prepared(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(BadInput, match=f"{message}.*; prepare or download the tokens again, or delete manifest.json"):
        check(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\x00" * 4096, '{"a": ' * 100_000])
def test_a_manifest_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BadInput, match=r"manifest\.json: damaged: (not JSON|nested deeper than 100)"):
        read_manifest(tmp_path)


def test_a_foreign_manifest_is_ignored(tmp_path: Path) -> None:
    for foreign in ([], {"files": 3}, {"format": 2}):
        (tmp_path / "manifest.json").write_text(json.dumps(foreign))
        assert read_manifest(tmp_path) is None


def test_ranks_must_match_the_manifest(tmp_path: Path) -> None:
    manifest = prepared(tmp_path)
    ranks = tmp_path / "tokenizer.tiktoken"
    ranks.write_text("ranks")
    tokenizer = {**TOKENIZER, "ranks_file": ranks.name}
    for digest in ({}, {"ranks_sha256": hashlib.sha256(b"ranks").hexdigest()}):  # older manifests have no hash
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": tokenizer | digest}))
        check(tmp_path)
    ranks.write_text("Ranks")
    with pytest.raises(BadInput, match=r"tokenizer\.tiktoken: damaged: got sha256 .*, wanted .*; prepare"):
        check(tmp_path)


@pytest.mark.parametrize("read", [read_manifest, read_plan])
def test_an_unreadable_directory_is_one_error_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BadInput, match=r"\.json: cannot be read: Permission denied; check"):
        read(tmp_path)


def test_an_extension_only_appends_special_tokens() -> None:
    plain = TokenizerRecord(name="x", vocabulary_size=257, end_of_text_id=256, ranks_file=None, fingerprint="a")
    turns = {"<|endoftext|>": 256, "<|user|>": 257}
    more = attrs.evolve(plain, vocabulary_size=258, special_tokens=turns)
    assert plain.extends(plain) and more.extends(plain) and not plain.extends(more)
    for change in (
        {"special_tokens": {**turns, "<|user|>": 5}},
        {"special_tokens": {**turns, "<|end|>": 258}},
        {"special_tokens": {"<|end|>": 256, "<|user|>": 257}},
        {"fingerprint": "b"},
        {"pattern": "."},
        {"end_of_text_id": 257},
        {"vocabulary_size": 259},
    ):
        assert not attrs.evolve(more, **change).extends(plain)


ADDED = {"id": 5, "content": "<think>", "special": False}
STRUCTURES = ("", "x", "[]", "5", "null", "{}", "[" * 5000, '{"added_tokens": null}', '{"added_tokens": [1]}')


def test_a_structure_needs_valid_added_tokens() -> None:
    keys = {"name": "x", "vocabulary_size": 9, "end_of_text_id": 8, "ranks_file": None, "fingerprint": "a"}
    changed: list[dict[str, Any]] = [{"id": "5"}, {"id": True}, {"content": 5}, {"special": None}, {"special": 1}]
    forged = [json.dumps({"added_tokens": [ADDED | change]}) for change in changed]
    forged += [
        json.dumps({"added_tokens": [{key: ADDED[key] for key in ADDED if key != missing_key}]})
        for missing_key in ADDED
    ]
    for structure in (*STRUCTURES, *forged):
        with pytest.raises(
            ValueError, match=r"^structure: got .*, wanted the JSON text of an object whose \"added_tokens\""
        ):
            structured(keys | {"structure": structure}, TokenizerRecord)
    read = structured(keys | {"structure": json.dumps({"added_tokens": [ADDED | {"lstrip": True}]})}, TokenizerRecord)
    assert read.identity not in ("a", None)
    assert structured(keys | {"structure": '{"added_tokens": []}'}, TokenizerRecord).identity == "a"
