"""One unit of work: tiktoken's ids, and what cannot be encoded is named."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from common.errors import BadInput
from tests.conftest import shared
from tests.tokens.gpt2 import reference
from tests.tokens.preparing import COMMAND, PREPARE, succeed, tokens_of, write
from tokens.tokenizer.tokenizer import ByteTokenizer


def test_what_an_encoder_cannot_do_names_the_unit_and_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):  # what Rust's panics are to Python
        pass

    (tmp_path / "b.txt").write_text("boom")
    encode = ByteTokenizer.encode
    for error in (PanicException("stack overflow\nmore"), ValueError("Regex error")):

        def fail(tokenizer: ByteTokenizer, text: str, error: BaseException = error) -> np.ndarray:
            if text == "boom":
                raise error
            return encode(tokenizer, text)

        monkeypatch.setattr(ByteTokenizer, "encode", fail)
        message = re.escape(f"unit 0, made from {tmp_path}/b.txt: cannot be encoded: {str(error).splitlines()[0]}; ")
        with pytest.raises(BadInput, match=message):
            write(tmp_path / "out", tmp_path / "b.txt")


def test_gpt2_tokens_are_tiktokens_and_carry_their_ranks(corpus: Path, tmp_path: Path) -> None:
    ranks, out = shared("gpt2.tiktoken"), tmp_path / "out"
    text = (corpus / "c.txt").read_text()
    done = succeed(PREPARE, corpus / "c.txt", "--output", out, "--tokenizer", ranks, *COMMAND)
    assert tokens_of(out, "train") + tokens_of(out, "validation") == [*reference().encode_ordinary(text), 50256]
    assert (out / "tokenizer.tiktoken").read_bytes() == ranks.read_bytes()
    tokenizer = json.loads((out / "manifest.json").read_text())["tokenizer"]
    assert tokenizer["ranks_sha256"] == hashlib.sha256(ranks.read_bytes()).hexdigest()
    assert f"{out}: 1 documents, " in done.stdout
