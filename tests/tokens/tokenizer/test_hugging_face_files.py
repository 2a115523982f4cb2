"""Hugging Face tokenizer files: merges from ranks, and damaged files refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from tests.tokens.gpt2 import strange_texts
from tokens.tokenizer.hugging_face_files import read_tokenizer_files, write_tokenizer_files
from tokens.tokenizer.known import PATTERNS
from tokens.tokenizer.loading import load_tokenizer
from tokens.tokenizer.tokenizer import PROBE, byte_pair_tokenizer


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
@pytest.mark.parametrize("content", [b'{"a": ' * 100_000, b"\xff", b"[]", b'{"model": []}', b'{"\\ud800": {}}'])
def test_damaged_tokenizer_files_are_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=rf"{name}: damaged: .*; pass a tokenizer with --tokenizer"):
        read_tokenizer_files(tmp_path)


REGEX: Any = {"type": "Split", "pattern": {"Regex": PATTERNS["cl100k"]}, "behavior": "Isolated", "invert": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}}


TEMPLATE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}}
ADDED: dict[str, Any] = {"id": 256, "content": "<|endoftext|>", "special": True}
OTHERS: list[tuple[str, dict[str, Any], str]] = [  # file, changed keys, the key that is named
    ("tokenizer.json", {"normalizer": {"type": "NFC"}}, "normalizer"),
    ("tokenizer.json", {"truncation": {"max_length": 50}}, "truncation"),
    ("tokenizer.json", {"pre_tokenizer": None}, "pre_tokenizer"),
    ("tokenizer.json", sequence(REGEX), "pre_tokenizer: got ['Split']"),
    ("tokenizer.json", sequence({"type": "Digits"}, LEVEL), "pre_tokenizer: got ['Digits', 'ByteLevel']"),
    ("tokenizer.json", sequence({**REGEX, "pattern": {"Regex": "."}}, LEVEL), "pre_tokenizer: Split: pattern"),
    ("tokenizer.json", sequence({**REGEX, "behavior": "Removed"}, LEVEL), "pre_tokenizer: Split: behavior"),
    ("tokenizer.json", sequence(REGEX, {**LEVEL, "use_regex": True}), "pre_tokenizer: ByteLevel: use_regex"),
    ("tokenizer.json", sequence(REGEX, {"type": "ByteLevel", "add_prefix_space": False}), "ByteLevel: use_regex"),
    ("tokenizer.json", {"post_processor": {"type": "Sequence", "processors": [LEVEL, {"type": "Other"}]}}, "'Other'"),
    ("tokenizer.json", {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "ByteLevel: use_regex"),
    ("tokenizer.json", {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "add_prefix_space"),
    ("tokenizer.json", {"pre_tokenizer": {"type": "ByteLevel", "new": 1}}, "pre_tokenizer: ByteLevel: 'new'"),
    ("tokenizer.json", {"post_processor": {**TEMPLATE, "special_tokens": {"<s>": {"id": "<s>"}}}}, "special_tokens"),
    ("tokenizer.json", {"post_processor": {**TEMPLATE, "single": []}}, "post_processor: single"),
    ("tokenizer.json", {"decoder": {"type": "Metaspace"}}, "decoder: type"),
    ("tokenizer.json", {"added_tokens": []}, "added_tokens: got none"),
    ("tokenizer.json", {"added_tokens": [ADDED, {**ADDED, "id": 257, "content": " ", "special": False}]}, "1: special"),
    ("tokenizer.json", {"added_tokens": [ADDED, {**ADDED, "content": "<|end|>"}]}, "an id or a content twice"),
    ("tokenizer.json", {"added_tokens": [ADDED, {**ADDED, "id": 257}]}, "an id or a content twice"),
    ("tokenizer.json", {"added_tokens": [{**ADDED, "lstrip": True}]}, "added_tokens: 0: lstrip"),
    ("tokenizer.json", {"added_tokens": [{**ADDED, "id": 65}]}, "an id or a content twice"),
    *(
        ("tokenizer.json", {"model": {key: value}}, f"model: {key}")
        for key, value in {
            "type": "Unigram",
            "dropout": 0.1,
            "unk_token": "<unk>",
            "byte_fallback": True,
            "merges": ["a b"],
            "vocab": {"日": 0},
        }.items()
    ),
    ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}, "tokenizer_class"),
    ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space"),
    ("tokenizer_config.json", {"add_bos_token": True}, "add_bos_token"),
    ("tokenizer_config.json", {"eos_token": {"content": "</s>"}}, "eos_token"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"257": {"content": "<x>"}}}, "added_tokens_decoder"),
    ("special_tokens_map.json", {"pad_token": "[PAD]"}, "pad_token"),
    ("added_tokens.json", {"<x>": 257}, "added_tokens_decoder: '257'"),
]


@pytest.mark.parametrize(("name", "changed", "key"), OTHERS)
def test_whatever_gives_other_ids_than_ours_is_refused_by_name(
    tmp_path: Path, name: str, changed: dict[str, Any], key: str
) -> None:
    write_tokenizer_files(load_tokenizer("bytes"), tmp_path, 64)
    assert read_tokenizer_files(tmp_path) is not None
    path = tmp_path / name
    values = json.loads(path.read_text()) if path.exists() else {}
    for top, value in changed.items():
        values[top] = values[top] | value if top == "model" else value
    path.write_text(json.dumps(values))
    with pytest.raises(BadInput) as refused:
        read_tokenizer_files(tmp_path)
    assert f"{name}: " in str(refused.value)
    assert key in str(refused.value)


def test_what_transformers_adds_to_our_files_changes_no_id(tmp_path: Path) -> None:
    write_tokenizer_files(load_tokenizer("bytes"), tmp_path, 64)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"] |= {"dropout": None, "unk_token": None, "byte_fallback": False, "merges": [], "fuse_unk": False}
    path.write_text(json.dumps(values | {"post_processor": TEMPLATE | {"pair": []}}))
    assert read_tokenizer_files(tmp_path) is not None
    path.unlink()
    with pytest.raises(BadInput, match=r"vocab\.json: got 257 ids of an unknown tokenizer, without tokenizer\.json"):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize("offset", [0, 7])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_transformers_gives_equal_ids_for_any_pattern_and_specials(tmp_path: Path, pattern: str, offset: int) -> None:
    transformers = pytest.importorskip("transformers")
    words = [*(bytes([byte]) for byte in range(256)), b" t", b"he", b" the", b".\n", b"\n\n", b"12", b"'s", b"xyz"]
    ranks = {word: offset + number for number, word in enumerate(words)}  # no merge gives xyz: it is one by itself
    tokenizer = byte_pair_tokenizer("own", ranks, pattern).with_special_tokens(["<|user|>", "<|end|>"])
    write_tokenizer_files(tokenizer, tmp_path, 64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*PROBE, *strange_texts(200, ("xyz", ".\n", "ABc's"))]:
        ids = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ids == tokenizer.encode(text).tolist()
    for name, number in tokenizer.special_tokens.items():
        assert theirs.encode(name, add_special_tokens=False) == [number] and theirs.decode([number]) == name
    again = read_tokenizer_files(tmp_path)
    assert again is not None and again.coder.ranks == ranks and again.pattern == pattern
    assert (again.special_tokens, again.end_of_text) == (tokenizer.special_tokens, "<|endoftext|>")
