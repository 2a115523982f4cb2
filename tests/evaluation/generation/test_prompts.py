"""Prompts are read from files."""

from pathlib import Path

import pytest

from common.errors import BadInput
from evaluation.generation.prompts import read_prompt


def test_prompt_file_loses_only_its_last_newline(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("Straße\r\n\n".encode())
    assert read_prompt(f"FILE:{tmp_path / 'text'}") == "Straße\r\n"
    (tmp_path / "text").write_bytes(b"ab\xff")
    for path, problem in ((tmp_path / "text", "in position 2"), (tmp_path, "directory"), ("/dev/zero", "more than")):
        with pytest.raises(BadInput, match=f"cannot be read as a prompt: .*{problem}"):
            read_prompt(f"FILE:{path}")
