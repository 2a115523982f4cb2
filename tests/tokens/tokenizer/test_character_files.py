"""Character vocabularies are read from pickles and JSON; no pickle is executed, and damage causes a one-line error."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from tokens.tokenizer.loading import read_characters

MANY = [chr(0x20000 + number) for number in range(2500)]  # more items than one pickle instruction stores


def meta(characters: list[str]) -> dict[str, Any]:
    """Return the content of nanoGPT's meta.pkl."""
    ids = {character: number for number, character in enumerate(characters)}
    return {"vocab_size": len(ids), "itos": {number: character for character, number in ids.items()}, "stoi": ids}


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("protocol", range(1, 6))
def test_nanogpts_vocabulary_is_read(tmp_path: Path, protocol: int) -> None:
    for values in (meta(["\n", "é", "a"]), meta(MANY)):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(values, protocol))
        assert read_characters(tmp_path / "meta.pkl") == "".join(values["stoi"])


@pytest.mark.parametrize("values", [["b", "a"], {"a": 1, "b": 0}, {"tokenizer": {"characters": "ba"}}])
def test_characters_in_json_are_sorted_by_id(tmp_path: Path, values: Any) -> None:
    (tmp_path / "x.json").write_text(json.dumps(values))
    assert read_characters(tmp_path / "x.json") == "ba"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"stoi": Evil()}), "byte .*: contains the instruction STACK_GLOBAL, which a vocabulary"),
        (pickle.dumps(Evil(), 0), "byte 0: contains the instruction GLOBAL"),
        (pickle.dumps({"stoi": {"a": 0, "b": 2}}), "got 2 entries, wanted each of the ids 0"),
        (pickle.dumps({"stoi": {"ab": 0}}), "got 1 entries, wanted each of the ids 0"),
        (pickle.dumps(meta(["\ud800"])), "surrogates not allowed"),
        (pickle.dumps(meta(["a", "b"]))[:-5], "pickle exhausted"),
        (b'["a", "a"]', "got 2 entries, wanted each of the ids 0"),
        (b"[]", "got 0 entries"),
        (b"[[1]]", "unhashable"),
    ],
)
def test_unexpected_content_is_refused_and_never_executed(
    tmp_path: Path, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("x.json" if content[:1] in b"[{" else "x.pkl")
    path.write_bytes(content)
    with pytest.raises(BadInput, match=rf"^{path}: .*{message}.*; wanted nanoGPT's meta.pkl, or JSON"):
        read_characters(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
