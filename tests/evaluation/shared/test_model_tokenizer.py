"""A tokenizer from --tokenizer that is not the model's own is reported; a run's record names its token directories."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import BadInput
from evaluation.generation.sample import training_data
from evaluation.loss.token_range import choose
from evaluation.shared.given_tokenizer import GivenTokenizer
from evaluation.shared.model_location import ModelLocation
from evaluation.shared.model_tokenizer import given_tokenizer, tokenizer_of
from tests.model.test_gpt import SMALL
from tokens.tokenizer.loading import load_tokenizer, record_of


def test_a_different_tokenizer_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def record_of_given(run: Path, name: str) -> GivenTokenizer | None:
        return given_tokenizer(ModelLocation(run / "checkpoints" / "a", run, run), load_tokenizer(name), SMALL)

    for name, record in (
        ("run", {"tokenizer": record_of(load_tokenizer("bytes"), ranks=False).as_json()}),
        ("old", {}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "resolved.json").write_text(json.dumps(record))
    assert record_of_given(tmp_path / "run", "bytes") is None  # the tokenizer of the run's tokens
    assert capsys.readouterr().err == ""
    characters = record_of_given(tmp_path / "run", "chars:abc")
    assert characters is not None and (characters.name, characters.is_other) == ("chars", True)
    assert "--tokenizer chars gives different ids from the model's own tokenizer, bytes" in capsys.readouterr().err
    unknown = record_of_given(tmp_path / "old", "bytes")
    assert unknown is not None and (unknown.name, unknown.is_other) == ("bytes", False)
    assert GivenTokenizer.of({"given_tokenizer": characters.as_record()}) == characters
    # A model that names no tokenizer but has GPT-2's vocabulary size is assumed to use GPT-2's tokenizer, even with
    # --tokenizer.
    location = ModelLocation(tmp_path / "old" / "checkpoints" / "a", tmp_path / "old", tmp_path / "old")
    named = attrs.evolve(load_tokenizer("bytes"), name="gpt2")
    assert given_tokenizer(location, named, attrs.evolve(SMALL, vocab_size=50257)) is None
    assert given_tokenizer(location, named, SMALL) is not None
    for damaged in ({"name": 5, "identity": "x", "is_other": True}, "bytes", {"name": "bytes"}):
        with pytest.raises(ValueError, match="given_tokenizer: wanted an object"):
            GivenTokenizer.of({"given_tokenizer": damaged})


def test_several_token_directories_are_searched_but_not_measured(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("a", "b")]
    for directory in directories:
        directory.mkdir()
        save_file({"tokens": np.arange(9, dtype=np.uint16)}, directory / "train.safetensors")
        (directory / "meta.pkl").write_text("not nanoGPT's")
    names = [str(directory) for directory in directories]
    (tmp_path / "resolved.json").write_text(json.dumps({"token_files": names}))
    location = ModelLocation(tmp_path, tmp_path, tmp_path)
    trained: Any = SimpleNamespace(location=location, tokenizer=load_tokenizer("bytes"))
    assert [stream.files[0].path.parent for stream in training_data(trained, [])] == directories
    loss: Any = SimpleNamespace(name=None, tokens=None)
    with pytest.raises(BadInput, match="does not name exactly one token directory; pass --tokens DIR"):
        choose(loss, [location])
    assert tokenizer_of(location, None, SMALL) is None  # no meta.pkl is read
    (tmp_path / "resolved.json").write_text(json.dumps({"token_files": names[0]}))
    assert [stream.files[0].path.parent for stream in training_data(trained, [])] == directories[:1]
    with pytest.raises(BadInput, match=r"a/meta\.pkl"):
        tokenizer_of(location, None, SMALL)
    (tmp_path / "resolved.json").write_text("{}")
    with pytest.raises(BadInput, match="does not name a token directory; pass --against DIR"):
        training_data(trained, [])
    with pytest.raises(BadInput, match="does not name exactly one token directory; pass --tokens DIR"):
        choose(loss, [location])
