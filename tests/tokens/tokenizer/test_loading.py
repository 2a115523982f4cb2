"""Tokenizers are the same if they give the same ids to every text; a fingerprint of a few texts cannot prove that."""

import json
from pathlib import Path

import attrs
import pytest

from common.checks import structured
from common.errors import BadInput
from tests.tokens.format.token_directory import prepared
from tests.tokens.tokenizer.test_hugging_face_files import added
from tokens.format.manifest import TokenizerRecord
from tokens.search.overlap import open_comparable
from tokens.tokenizer.loading import (
    gives_same_ids,
    identity,
    is_recorded,
    load_tokenizer,
    record_of,
    recorded_tokenizer,
)
from tokens.tokenizer.ranks import BYTE_LEVEL, ranks_text
from tokens.tokenizer.tokenizer import END_OF_TEXT, LibraryCoder, Tokenizer, fingerprint


def with_added(*ordinary: str, special: tuple[str, ...] = ()) -> Tokenizer:
    """Return a byte tokenizer with ordinary added tokens, which a tokenizer.json may have."""
    tokens = [added(256, END_OF_TEXT), *(added(257 + n, name, special=False) for n, name in enumerate(ordinary))]
    tokens += [added(300 + n, name) for n, name in enumerate(special)]
    ranks = {bytes([byte]): byte for byte in range(256)} | {
        t["content"].encode(): t["id"] for t in tokens if not t["special"]
    }
    structure = json.dumps({"normalizer": None, "pre_tokenizer": BYTE_LEVEL, "added_tokens": tokens})
    named = {token["content"]: token["id"] for token in tokens if token["special"]}
    return Tokenizer(name="own", coder=LibraryCoder(ranks, structure), special_tokens=named)


def test_ordinary_added_tokens_are_part_of_the_identity(tmp_path: Path) -> None:
    think, tool, none = with_added("<think>"), with_added("<tool>"), with_added()
    assert think.encode("<think>").tolist() != tool.encode("<think>").tolist()
    assert fingerprint(think) == fingerprint(tool) == fingerprint(none) == identity(none)
    assert len({identity(tokenizer_variant) for tokenizer_variant in (think, tool, none)}) == 3
    # Another special token changes no ids, because its name in a text is ordinary text.
    assert gives_same_ids(think, with_added("<think>", special=("<|end|>",)))
    assert not gives_same_ids(think, tool) and not gives_same_ids(think, none)
    for first, second in ((think, tool), (tool, think), (none, think), (think, none)):
        record = structured(json.loads(json.dumps(record_of(first, ranks=True).as_json())), TokenizerRecord)
        assert record.fingerprint == fingerprint(first)  # as in current manifests
        assert record.identity == identity(first)
        assert is_recorded(first, record, tmp_path) and not is_recorded(second, record, tmp_path)


def test_other_added_tokens_make_tokens_incomparable(tmp_path: Path) -> None:
    values, tokenizer = prepared(tmp_path), with_added("<think>")
    values["tokenizer"] = record_of(tokenizer, ranks=True).as_json()
    (tmp_path / "tokenizer.tiktoken").write_bytes(ranks_text(tokenizer.coder.ranks))
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    assert open_comparable(tmp_path, "train", tokenizer).length == 30_000
    for second in (with_added("<tool>"), with_added(), load_tokenizer("bytes")):
        with pytest.raises(BadInput, match="its tokenizer own gives different ids than"):
            open_comparable(tmp_path, "train", second)


def test_an_unsupported_recorded_structure_is_refused(tmp_path: Path) -> None:
    tokenizer = with_added("<think>")
    (tmp_path / "tokenizer.tiktoken").write_bytes(ranks_text(tokenizer.coder.ranks))
    record = record_of(tokenizer, ranks=True)
    assert record.structure is not None
    assert identity(recorded_tokenizer(record, tmp_path)) == identity(tokenizer)
    sound = json.loads(record.structure)
    for change in (
        {"pre_tokenizer": {"type": "x"}},
        {"other": 1},
        {"added_tokens": [{**added(256, "a"), "lstrip": 5}]},
    ):
        forged = attrs.evolve(record, structure=json.dumps(sound | change))
        with pytest.raises(
            BadInput, match=r"^tokenizer own: structure: the tokenizers library cannot read it.*; prepare"
        ):
            recorded_tokenizer(forged, tmp_path)
