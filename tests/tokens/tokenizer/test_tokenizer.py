"""GPT-2 ids equal tiktoken's, and a text cannot forge the end of a document."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import pytest
import tiktoken

from common.errors import BadInput
from common.files import sha256
from tests.conftest import shared
from tokens.format.manifest import RANKS_FILE
from tokens.tokenizer.hugging_face_files import tokenizer_text
from tokens.tokenizer.known import KNOWN_TOKENIZERS
from tokens.tokenizer.loading import load_tokenizer, record_of, recorded_tokenizer
from tokens.tokenizer.ranks import ranks_text, read_ranks
from tokens.tokenizer.tokenizer import byte_pair_tokenizer, fingerprint, token_dtype


def test_the_spelling_of_a_special_token_is_ordinary_text() -> None:
    tokenizer = load_tokenizer(str(shared("gpt2.tiktoken")))
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_of_text_id == 50256
    assert ids.dtype == np.uint16 and 50256 not in ids
    assert tokenizer.decode(ids.tolist()) == "a<|endoftext|>b"
    with pytest.raises(BadInput, match=r"tokenizer gpt2.*: cannot encode the text: .*stack"):
        tokenizer.encode("a" + " " * 1_000_000 + "b")
    assert 256 not in load_tokenizer("bytes").encode("a<|endoftext|>b")
    assert load_tokenizer("bytes").encode("né").tolist() == [110, 195, 169]
    assert load_tokenizer("bytes").decode([110, 195, 169, 256]) == "né<|endoftext|>"
    assert (token_dtype(65_536), token_dtype(65_537)) == (np.uint16, np.uint32)


def test_gpt2_without_a_network_gives_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(BadInput, match=r"--tokenizer FILE\.tiktoken.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("gpt2")
    # tiktoken can still read a local file, which our web client would refuse.
    assert len(tiktoken.load.load_tiktoken_bpe(str(shared("gpt2.tiktoken")))) == 50256


def test_unknown_ranks_need_a_recorded_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpt2.tiktoken"
    lines = shared("gpt2.tiktoken").read_bytes().splitlines()
    path.write_bytes(b"\r\n".join(reversed(lines)))  # recognized by its ranks, not by its bytes or its name
    assert load_tokenizer(str(path)).end_of_text_id == 50256
    path.write_bytes(b"\n".join([*lines[:-2], lines[-1].split()[0] + b" 50254", lines[-2].split()[0] + b" 50255"]))
    with pytest.raises(BadInput, match=r"gpt2\.tiktoken: contains unknown ranks; wanted those of gpt2"):
        load_tokenizer(str(path))
    path.write_bytes(b"\n".join(lines[:300]))
    recorded = fingerprint(byte_pair_tokenizer("", read_ranks(path)))
    assert load_tokenizer(str(path), recorded).vocabulary_size == 301
    published = attrs.evolve(KNOWN_TOKENIZERS["cl100k"], ranks_sha256=sha256(path))
    # From here on, these ranks are known, as if they had been published after the tokens were made.
    monkeypatch.setitem(KNOWN_TOKENIZERS, "cl100k", published)
    assert [
        load_tokenizer(str(path), recorded_fingerprint).vocabulary_size for recorded_fingerprint in (recorded, None)
    ] == [301, 100_277]
    with pytest.raises(BadInput, match="contains unknown ranks"):
        load_tokenizer(str(path), fingerprint(byte_pair_tokenizer("", read_ranks(path), r"\p{N}|\s+|\S+")))


NO_BYTE = "\n".join([*(f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(255)), "YWI= 255"])
WRONG: list[tuple[Callable[[Path], object], str]] = [  # function that writes x.tiktoken, expected error
    (lambda path: path.write_text("YQ== 0\nnonsense\n"), "line 2: got b'nonsense'"),
    (lambda path: path.write_text("YQ== 0\nYg== 2\n"), "every token and rank only once"),
    (lambda path: path.write_text(NO_BYTE), "byte 0xff has no rank; every byte needs one"),  # tiktoken would panic
    (lambda path: None, "cannot be read: No such file or directory; pass another --tokenizer"),
    (os.mkfifo, "cannot be read: is a pipe, wanted a regular file"),
    (os.mkdir, "cannot be read: is a folder, wanted a regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "cannot be read: is a device, wanted a regular file"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_unusable_ranks_are_one_error_line(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / "x.tiktoken")
    with pytest.raises(BadInput, match=rf"x\.tiktoken: .*{message}"):
        load_tokenizer(str(tmp_path / "x.tiktoken"))
    message = "tokenizer 'bert' is unknown; wanted bytes, chars, gpt2, cl100k, o200k or a file"
    with pytest.raises(BadInput, match=message):
        load_tokenizer("bert")


@pytest.mark.parametrize("name", ["bytes", "chars:ab<|>end", str(shared("gpt2.tiktoken"))])
def test_special_tokens_follow_the_vocabulary(name: str, tmp_path: Path) -> None:
    plain = load_tokenizer(name)
    more = plain.with_special_tokens(["<|end|>", "<|endoftext|>", "<|end|>"])
    size = plain.vocabulary_size
    assert more.special_tokens == {"<|endoftext|>": plain.end_of_text_id, "<|end|>": size}
    assert (more.vocabulary_size, more.end_of_text_id) == (size + 1, plain.end_of_text_id)
    ids = [*more.encode("a<|end|>"), size, size + 1, plain.end_of_text_id]
    assert more.decode(ids) == "a<|end|><|end|>\ufffd<|endoftext|>"
    assert size not in more.encode_batch(["a<|end|>", "<|end|>"])[0]
    assert fingerprint(more) == fingerprint(plain)
    record = record_of(more, ranks=more.has_ranks_file)
    (tmp_path / RANKS_FILE).write_bytes(ranks_text(more.coder.ranks))
    again = recorded_tokenizer(record, tmp_path)
    assert again.special_tokens == more.special_tokens and again.coder.ranks == more.coder.ranks
    assert again.pattern == more.pattern and again.end_of_text == "<|endoftext|>"


def test_an_ordinary_added_token_cannot_mark_turns(tmp_path: Path) -> None:
    values = json.loads(tokenizer_text(byte_pair_tokenizer("t", load_tokenizer("bytes").coder.ranks)))
    turn = {"id": 257, "content": "<|user|>", "special": False}
    values["added_tokens"].append(values["added_tokens"][0] | turn)
    (path := tmp_path / "t.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(str(path))
    with pytest.raises(BadInput, match=r"t: <\|user\|> is an added token, id 257, but not a special one; set"):
        tokenizer.with_special_tokens(["<|system|>", "<|user|>"])
    assert tokenizer.with_special_tokens(["<|system|>"]).special_tokens["<|system|>"] == 258
