"""A tokenizer that is given and is not the model's own is named."""

import json
from pathlib import Path

import attrs
import pytest

from evaluation.shared.given_tokenizer import GivenTokenizer
from evaluation.shared.model_location import ModelLocation
from evaluation.shared.model_tokenizer import given_tokenizer
from tests.model.test_gpt import SMALL
from tokens.tokenizer.loading import load_tokenizer, record_of


def test_a_tokenizer_other_than_its_own_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def given(run: Path, name: str) -> GivenTokenizer | None:
        return given_tokenizer(ModelLocation(run / "checkpoints" / "a", run, run), load_tokenizer(name), SMALL)

    for name, record in (
        ("run", {"tokenizer": record_of(load_tokenizer("bytes"), ranks=False).as_json()}),
        ("old", {}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "resolved.json").write_text(json.dumps(record))
    assert given(tmp_path / "run", "bytes") is None  # the tokenizer of its tokens
    assert capsys.readouterr().err == ""
    other = given(tmp_path / "run", "chars:abc")
    assert other is not None and (other.name, other.is_other) == ("chars", True)
    assert "--tokenizer chars gives other ids than its own tokenizer, bytes" in capsys.readouterr().err
    unknown = given(tmp_path / "old", "bytes")
    assert unknown is not None and (unknown.name, unknown.is_other) == ("bytes", False)
    assert GivenTokenizer.of({"given_tokenizer": other.as_record()}) == other
    # A model of GPT-2's size that names no tokenizer is taken for one of GPT-2's tokens without --tokenizer as well.
    place = ModelLocation(tmp_path / "old" / "checkpoints" / "a", tmp_path / "old", tmp_path / "old")
    named = attrs.evolve(load_tokenizer("bytes"), name="gpt2")
    assert given_tokenizer(place, named, attrs.evolve(SMALL, vocab_size=50257)) is None
    assert given_tokenizer(place, named, SMALL) is not None
    for damaged in ({"name": 5, "identity": "x", "is_other": True}, "bytes", {"name": "bytes"}):
        with pytest.raises(ValueError, match="given_tokenizer: wanted an object"):
            GivenTokenizer.of({"given_tokenizer": damaged})
