"""Hugging Face tokenizer files: merges from ranks, and damaged files refused."""

import itertools
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.tokens.gpt2 import tiktokens
from tokens.tokenizer.hugging_face_files import _halves, read_tokenizer_files


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
@pytest.mark.parametrize("content", [b'{"a": ' * 100_000, b"\xff", b"[]", b'{"model": []}', b'{"\\ud800": {}}'])
def test_damaged_tokenizer_files_are_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=rf"{name}: (damaged: |got 1 tokens).*; pass a tokenizer with --tokenizer"):
        read_tokenizer_files(tmp_path)


def test_the_halves_of_a_token_are_what_its_last_merge_joins() -> None:
    ranks = tiktokens().ranks()
    halves = _halves(ranks)
    assert halves is not None
    assert list(halves) == [token for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    for token, pair in halves.items():
        parts = [token[at : at + 1] for at in range(len(token))]
        while len(parts) > 2:  # byte-pair encoding, step by step
            merged = [ranks.get(left + right, len(ranks)) for left, right in itertools.pairwise(parts)]
            first = merged.index(min(merged))
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        assert tuple(parts) == pair
