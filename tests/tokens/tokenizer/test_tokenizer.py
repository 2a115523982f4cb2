"""GPT-2 ids are tiktoken's, and a text cannot forge a document's end."""

import base64
import functools
import os
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from common.errors import BadInput
from tests.conftest import shared
from tests.tokens.gpt2 import reference
from tokens.tokenizer.tokenizer import byte_pair_tokenizer, fingerprint, load_tokenizer, read_ranks, token_dtype


@pytest.mark.parametrize("name", ["tinyshakespeare.txt", "wikitext2.txt", "instruction-data.json"])
def test_gpt2_ids_equal_tiktokens_for_the_whole_file(name: str) -> None:
    text = shared(name).read_text()
    ours = load_tokenizer(str(shared("gpt2.tiktoken")))
    ids = ours.encode(text)
    assert ids.tolist() == reference().encode_ordinary(text)
    assert ids.dtype == np.uint16
    assert ours.decode(ids.tolist()) == text


def test_the_text_of_a_special_token_is_ordinary_text() -> None:
    tokenizer = load_tokenizer(str(shared("gpt2.tiktoken")))
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_of_text_id == 50256
    assert 50256 not in ids
    assert tokenizer.decode(ids.tolist()) == "a<|endoftext|>b"
    assert 256 not in load_tokenizer("bytes").encode("a<|endoftext|>b")


def test_bytes_round_trip() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("né").tolist() == [110, 195, 169]
    assert tokenizer.decode([110, 195, 169, 256]) == "né<|endoftext|>"


def test_ids_take_two_bytes_where_they_fit() -> None:
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32


def test_gpt2_without_network_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(BadInput, match=r"--tokenizer FILE\.tiktoken.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize(
    ("content", "message"),
    [("YQ== 0\nnonsense\n", "line 2: got b'nonsense'"), ("YQ== 0\nYg== 2\n", "wanted each of 0, 1, 2")],
)
def test_damaged_ranks_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_text(content)
    with pytest.raises(BadInput, match=message):
        load_tokenizer(str(path))


def test_unknown_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="tokenizer 'bert' is unknown; wanted gpt2, bytes or"):
        load_tokenizer("bert")
    with pytest.raises(BadInput, match="no such ranks file"):
        load_tokenizer(str(tmp_path / "absent.tiktoken"))


def test_ranks_without_one_of_the_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tiktoken"
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(255)] + ["YWI= 255"]
    path.write_text("\n".join(lines))
    with pytest.raises(BadInput, match=r"x\.tiktoken: byte 0xff has no rank of its own"):  # tiktoken panics
        load_tokenizer(str(path))


def test_ranks_of_unknown_pattern_are_refused_but_beside_tokens_made_with_gpt2s(tmp_path: Path) -> None:
    path = tmp_path / "gpt2.tiktoken"
    lines = shared("gpt2.tiktoken").read_bytes().splitlines()
    path.write_bytes(b"\r\n".join(reversed(lines)))  # known by content, not by its bytes or name
    assert load_tokenizer(str(path)).end_of_text_id == 50256
    path.write_bytes(b"\n".join([*lines[:-2], lines[-1].split()[0] + b" 50254", lines[-2].split()[0] + b" 50255"]))
    with pytest.raises(BadInput, match=r"gpt2\.tiktoken: got 50,256 ranks of an unknown tokenizer, wanted GPT-2's"):
        load_tokenizer(str(path))
    path.write_bytes(b"\n".join(lines[:300]))
    recorded = fingerprint(byte_pair_tokenizer("", read_ranks(path), None))
    assert load_tokenizer(str(path), recorded).vocabulary_size == 301
    with pytest.raises(BadInput, match="unknown tokenizer"):
        load_tokenizer(str(path), fingerprint(byte_pair_tokenizer("", read_ranks(path), None, r"\p{N}|\s+|\S+")))


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_ranks_that_cannot_be_read_are_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.tiktoken"
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": functools.partial(os.symlink, "/dev/zero")}[kind](path)
    with pytest.raises(BadInput, match=rf"x\.tiktoken: cannot be read: is a {kind}, wanted a regular file"):
        load_tokenizer(str(path))
