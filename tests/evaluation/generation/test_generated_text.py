"""Prompts from anywhere; text in whole characters."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BadInput
from evaluation.generation.generated_text import read_prompt, whole_characters
from evaluation.shared.load import Trained
from tokens.tokenizer.loading import load_tokenizer


@given(st.binary(), st.text())
def test_the_streamed_text_is_that_of_all_tokens(some: bytes, text: str) -> None:
    trained = Trained(None, load_tokenizer("bytes"), None)  # type: ignore[arg-type]
    ids = [*some, 256, *text.encode(), *some, 300]
    assert "".join(whole_characters(trained, ids)) == trained.decode(ids)
    assert [*whole_characters(trained, "aé€😀".encode())] == ["a", "é", "€", "😀", ""]


def test_prompts_of_files_end_before_their_last_line_end_or_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("Straße\r\n\n".encode())
    assert read_prompt(f"FILE:{tmp_path / 'text'}") == "Straße\r\n"
    (tmp_path / "text").write_bytes(b"ab\xff")
    for path, problem in ((tmp_path / "text", "in position 2"), (tmp_path, "directory"), ("/dev/zero", "more than")):
        with pytest.raises(BadInput, match=f"cannot be read as a prompt: .*{problem}"):
            read_prompt(f"FILE:{path}")
