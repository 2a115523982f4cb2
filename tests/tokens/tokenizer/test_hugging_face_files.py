"""Hugging Face tokenizer files: merges from ranks, published structures, and refusal of damaged files."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import tokenizers

from common.errors import BadInput
from tests.conftest import slow
from tests.tokens.gpt2 import strange_texts
from tests.tokens.preparing import tokens_of, write
from tokens.format.manifest import RANKS_FILE
from tokens.tokenizer.hugging_face_files import read_tokenizer_files, write_tokenizer_files
from tokens.tokenizer.known import PATTERNS
from tokens.tokenizer.loading import load_tokenizer, record_of, recorded_tokenizer
from tokens.tokenizer.ranks import library_values, ranks_text
from tokens.tokenizer.tokenizer import PROBE, LibraryCoder, byte_pair_tokenizer, fingerprint


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
@pytest.mark.parametrize("content", [b'{"a": ' * 100_000, b"\xff", b"[]", b'{"model": []}', b'{"\\ud800": {}}'])
def test_damaged_tokenizer_files_are_one_error_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=rf"{name}: damaged: .*; pass a tokenizer with --tokenizer"):
        read_tokenizer_files(tmp_path)


NFC = {"type": "NFC"}
REGEX: Any = {"type": "Split", "pattern": {"Regex": PATTERNS["cl100k"]}, "behavior": "Isolated", "invert": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}}


TEMPLATE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}}
ADDED: dict[str, Any] = {"id": 256, "content": "<|endoftext|>", "special": True}
OTHERS: list[tuple[str, dict[str, Any], str]] = [  # file, changed keys, key that the error names
    ("tokenizer.json", {"normalizer": {"type": "NFKC"}}, "normalizer"),
    ("tokenizer.json", {"normalizer": {"type": "Sequence", "normalizers": [NFC, {"type": "Lowercase"}]}}, "Lowercase"),
    ("tokenizer.json", {"truncation": {"max_length": 50}}, "truncation"),
    ("tokenizer.json", {"pre_tokenizer": None}, "pre_tokenizer"),
    ("tokenizer.json", sequence(REGEX), "pre_tokenizer: got ['Split']"),
    ("tokenizer.json", sequence({"type": "Digits"}, LEVEL), "pre_tokenizer: got ['Digits', 'ByteLevel']"),
    ("tokenizer.json", sequence(LEVEL, REGEX), "pre_tokenizer: got ['ByteLevel', 'Split']"),
    ("tokenizer.json", sequence({**REGEX, "behavior": "Removed"}, LEVEL), "pre_tokenizer: Split: behavior"),
    ("tokenizer.json", sequence({**REGEX, "invert": 1}, LEVEL), "pre_tokenizer: Split: invert"),
    ("tokenizer.json", {"post_processor": {"type": "Sequence", "processors": [LEVEL, {"type": "Other"}]}}, "'Other'"),
    ("tokenizer.json", {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "ByteLevel: use_regex"),
    ("tokenizer.json", {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "add_prefix_space"),
    ("tokenizer.json", {"pre_tokenizer": {"type": "ByteLevel", "new": 1}}, "pre_tokenizer: ByteLevel: 'new'"),
    ("tokenizer.json", {"post_processor": {**TEMPLATE, "new": 1}}, "post_processor: 'new'"),
    ("tokenizer.json", {"post_processor": {**TEMPLATE, "single": []}}, "post_processor: single"),
    ("tokenizer.json", {"decoder": {"type": "Metaspace"}}, "decoder: type"),
    ("tokenizer.json", {"added_tokens": []}, "added_tokens: got none"),
    ("tokenizer.json", {"added_tokens": [ADDED, {**ADDED, "id": 257, "content": " ", "special": "no"}]}, "1: special"),
    ("tokenizer.json", {"added_tokens": [ADDED, {**ADDED, "content": "<|end|>"}]}, "the same id or content twice"),
    ("tokenizer.json", {"added_tokens": [ADDED, {**ADDED, "id": 257}]}, "the same id or content twice"),
    ("tokenizer.json", {"added_tokens": [{**ADDED, "lstrip": True}]}, "added_tokens: 0: lstrip"),
    ("tokenizer.json", {"added_tokens": [{**ADDED, "id": 65}]}, "the same id or content twice"),
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
    ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token"),
    ("tokenizer_config.json", {"additional_special_tokens": ["<x>"]}, "additional_special_tokens: 0: got '<x>'"),
    (
        "tokenizer_config.json",
        {"added_tokens_decoder": {"256": {"content": "<|endoftext|>", "lstrip": True}}},
        "added_tokens_decoder: 256: lstrip",
    ),
    ("tokenizer_config.json", {"eos_token": {"content": "</s>"}}, "eos_token"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"257": {"content": "<x>"}}}, "added_tokens_decoder"),
    ("special_tokens_map.json", {"pad_token": "[PAD]"}, "pad_token"),
    ("added_tokens.json", {"<x>": 257}, "added_tokens_decoder: '257'"),
]


@pytest.mark.parametrize(("name", "changed", "key"), OTHERS)
def test_unsupported_tokenizer_keys_are_refused_by_name(
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


def test_keys_added_by_transformers_are_accepted(tmp_path: Path) -> None:
    write_tokenizer_files(load_tokenizer("bytes"), tmp_path, 64)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"] |= {"dropout": None, "unk_token": None, "byte_fallback": False, "merges": [], "fuse_unk": False}
    path.write_text(json.dumps(values | {"post_processor": TEMPLATE | {"pair": []}}))
    assert read_tokenizer_files(tmp_path) is not None
    path.unlink()
    with pytest.raises(BadInput, match=r"vocab\.json: got 257 ids of an unknown tokenizer, and no tokenizer\.json"):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize("offset", [0, 7])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_transformers_gives_the_same_ids_for_any_pattern(tmp_path: Path, pattern: str, offset: int) -> None:
    transformers = pytest.importorskip("transformers")
    words = [*(bytes([byte]) for byte in range(256)), b" t", b"he", b" the", b".\n", b"\n\n", b"12", b"'s", b"xyz"]
    # Merges cannot form xyz, but the word xyz alone still gets its id.
    ranks = {word: offset + number for number, word in enumerate(words)}
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


WORDS = [*(bytes([byte]) for byte in range(256)), b" t", b"he", b" the", b".\n", b"\n\n", b"12", b"'s", b"in", b"ink"]
WORDS += ["é".encode(), "日".encode()[:2], "日".encode(), b"=("]
DEEPSEEK_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
BEGIN, END, USER = (
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<\uff5cUser\uff5c>",
)


def added(number: int, content: str, special: bool = True, normalized: bool = False) -> dict[str, Any]:
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized}
    return {"id": number, "content": content, **options, "special": special}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@attrs.frozen
class Published:
    """The structure of a published tokenizer.json and its tokenizer_config.json, with only a few words."""

    first: int  # id of the first word
    added: list[dict[str, Any]]
    splits: tuple[str, ...]
    normalizer: dict[str, Any] | None
    post_processor: dict[str, Any]
    settings: dict[str, Any]
    end_of_text: str
    surrounding: tuple[str, ...] = ()

    def write(self, directory: Path) -> tokenizers.Tokenizer:
        """Write the two files. Return the library's own tokenizer, which treats special tokens as ordinary text."""
        steps = {"type": "Sequence", "pretokenizers": [*map(split, self.splits), LEVEL]}
        ranks = {word: self.first + number for number, word in enumerate(WORDS)}
        values = library_values(ranks, self.added, steps, self.normalizer)
        values["post_processor"] = self.post_processor
        (directory / "tokenizer.json").write_text(json.dumps(values, ensure_ascii=False))
        (directory / "tokenizer_config.json").write_text(json.dumps(self.settings))
        library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        library.encode_special_tokens = True
        return library


LAST = len(WORDS)
LLAMA_BEGIN = {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}
PUBLISHED = {
    "Llama 3.1": Published(
        first=0,
        added=[added(LAST + n, name) for n, name in enumerate(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])],
        splits=(PATTERNS["cl100k"],),
        normalizer=None,
        post_processor={
            "type": "Sequence",
            "processors": [
                {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
                {
                    "type": "TemplateProcessing",
                    "single": [LLAMA_BEGIN, {"Sequence": {"id": "A", "type_id": 0}}],
                    "pair": [LLAMA_BEGIN, {"Sequence": {"id": "A", "type_id": 0}}],
                    "special_tokens": {
                        "<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [LAST], "tokens": ["<|begin_of_text|>"]}
                    },
                },
            ],
        },
        settings={
            "added_tokens_decoder": {str(LAST): added(LAST, "<|begin_of_text|>") | {"id": None}},
            "bos_token": "<|begin_of_text|>",
            "clean_up_tokenization_spaces": True,
            "eos_token": "<|end_of_text|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        end_of_text="<|end_of_text|>",
        surrounding=("<|begin_of_text|>",),
    ),
    "Qwen 3": Published(
        first=0,
        added=[
            *(added(LAST + n, name) for n, name in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])),
            *(
                added(LAST + 3 + n, name, special=False)
                for n, name in enumerate(["<tool_call>", "<think>", "</think>"])
            ),
        ],
        splits=(PATTERNS["qwen2"],),
        normalizer=NFC,
        post_processor={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        settings={
            "add_bos_token": False,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
        end_of_text="<|im_end|>",
    ),
    "DeepSeek": Published(
        first=2,
        added=[
            *(added(0, BEGIN, normalized=True), added(1, END, normalized=True)),
            *(added(LAST + 2, USER, special=False), added(LAST + 3, "<think>", special=False, normalized=True)),
        ],
        splits=DEEPSEEK_SPLITS,
        normalizer={"type": "Sequence", "normalizers": []},
        post_processor={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        settings={
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": {"__type": "AddedToken", "content": BEGIN, "normalized": True},
            "eos_token": {"__type": "AddedToken", "content": END, "normalized": True},
            "legacy": True,
            "sp_model_kwargs": {},
            "tokenizer_class": "LlamaTokenizerFast",
            "unk_token": None,
        },
        end_of_text=END,
        surrounding=(BEGIN,),
    ),
}
ODD_PARTS = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "<|im_start|>",
        "<|end_of_text|>",
        BEGIN,
        END,
        USER,
        "thinking",
        "<thi",
        "nk>",
    ),
    *(
        "e\u0301",
        "\u0301",
        "\u212b",
        "한국",
        "\u1112\u1161\u11ab",
        "日本語カナ",
        "=(",
        "1234567",
        "'S",
        "\u017f",
        "x=y",
    ),
)


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_published_tokenizers_give_the_librarys_ids(tmp_path: Path, published: Published) -> None:
    library = published.write(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    texts = [*PROBE, *strange_texts(2000, ODD_PARTS)]
    for text in texts:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == ids, ascii(text)
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
    assert tokenizer.vocabulary_size == library.get_vocab_size() and tokenizer.end_of_text == published.end_of_text
    assert tokenizer.special_tokens == {token["content"]: token["id"] for token in published.added if token["special"]}
    assert tokenizer.surrounding_tokens == published.surrounding


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_published_tokenizers_survive_recording_and_export(tmp_path: Path, published: Published) -> None:
    library = published.write(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    (tmp_path / RANKS_FILE).write_bytes(ranks_text(tokenizer.coder.ranks))
    recorded = recorded_tokenizer(record_of(tokenizer, ranks=True), tmp_path)
    exported = tmp_path / "exported"
    exported.mkdir()
    write_tokenizer_files(tokenizer.with_special_tokens(["<|new|>"]), exported, 64)
    again = read_tokenizer_files(exported)
    assert again is not None and again.special_tokens["<|new|>"] == tokenizer.vocabulary_size
    assert fingerprint(recorded) == fingerprint(tokenizer) and recorded.special_tokens == tokenizer.special_tokens
    for text in strange_texts(300, ODD_PARTS):
        ids = library.encode(text, add_special_tokens=False).ids
        assert recorded.encode(text).tolist() == again.encode(text).tolist() == ids


@pytest.mark.parametrize("name", ["Qwen 3", *slow("DeepSeek")])
def test_a_long_document_has_the_librarys_ids(tmp_path: Path, name: str) -> None:
    library = PUBLISHED[name].write(tmp_path)
    # Long enough to be encoded in two pieces.
    text = "".join(f"<think> e\u0301t{number}=({number}.\n\n" for number in range(45_000))
    (tmp_path / "long.txt").write_text(text)
    write(tmp_path / "tokens", tmp_path / "long.txt", tokenizer=str(tmp_path / "tokenizer.json"))
    *ids, end = tokens_of(tmp_path / "tokens", "train")
    assert ids == library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert end == library.token_to_id(PUBLISHED[name].end_of_text)


def test_the_library_coder_supports_any_splits(tmp_path: Path) -> None:
    write_tokenizer_files(load_tokenizer("bytes"), tmp_path, 64)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    for steps in ([split("x+"), {**LEVEL, "use_regex": True}], [{**split(" "), "behavior": "MergedWithNext"}, LEVEL]):
        path.write_text(json.dumps(values | sequence(*steps)))
        tokenizer = read_tokenizer_files(tmp_path)
        assert tokenizer is not None and isinstance(tokenizer.coder, LibraryCoder)
        assert tokenizer.encode("xx <|endoftext|>").tolist() == [*b"xx <|endoftext|>"]
        assert "\ud800" not in tokenizer.decode(tokenizer.encode("a\ud800").tolist())
