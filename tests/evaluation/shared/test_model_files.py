"""Files that contradict each other about a network or its tokenizer are refused; no file takes precedence."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from common.errors import BadInput
from evaluation.shared.chat_template import end_ids, read_template
from evaluation.shared.foreign import load_foreign
from evaluation.shared.model_location import locate
from tests.evaluation.shared.test_foreign import write
from tests.model.test_gpt import SMALL
from tests.model.test_naming import nanogpt, network, plain_of
from tokens.tokenizer.hugging_face_files import read_tokenizer_files, write_tokenizer_files
from tokens.tokenizer.loading import load_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", nanogpt(plain_of(network(SMALL)), SMALL))


def write_index(model: Path, *names: str) -> None:
    tensors = load_file(model / "model.safetensors")
    for name in names:
        save_file(tensors, model / name)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, names[0])}))


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (
            lambda model: write_index(model, "model-00001-of-00001.safetensors"),
            "model.safetensors and the files listed in .* both",
        ),
        (
            lambda model: write_index(model, "model.safetensors", "model-00002-of-00002.safetensors"),
            "not listed in .*index",
        ),
        (lambda model: (model / "adapter_config.json").write_text("{}"), "adapters are not applied"),
        (
            lambda model: (model / "params.json").write_text('{"n_heads": 8, "vocab_size": -1}'),
            "n_heads: got 8, but config",
        ),
        (lambda model: (model / "model.json").write_text('{"n_layers": 99}'), None),
        (
            lambda model: (model / "config.json").write_text('{"n_head": 4, "n_heads": 2}'),
            "n_heads: got 2, but n_head: 4",
        ),
    ],
)
def test_contradicting_model_files_are_refused(model: Path, add: Callable[[Path], None], message: str | None) -> None:
    locate(str(model), None)
    add(model)
    if message is None:
        locate(str(model), None)  # the other file does not say how many layers there are
    else:
        with pytest.raises(BadInput, match=message):
            locate(str(model), None)


def test_unread_weight_files_are_noted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("pytorch_model.bin", "ckpt.pt"):
        (model / name).write_bytes(b"")
    locate(str(model), None)
    assert (
        "reading model.safetensors; this folder's other weight files are ignored: ckpt.pt and 1 more"
        in capsys.readouterr().err
    )
    load_foreign(model, None)


def test_contradicting_tokenizer_files_are_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    write_tokenizer_files(tokenizer, tmp_path, 128)
    assert read_tokenizer_files(tmp_path) is not None
    (tmp_path / "tokenizer.model").write_text("".join(f"{code} {rank}\n" for rank, code in enumerate(["YQ=="] * 300)))
    # tokenizer.model does not contain ranks, so a note says that it was not read.
    assert read_tokenizer_files(tmp_path) is not None
    (tmp_path / "tokenizer.model").unlink()
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary | {"a": vocabulary["b"], "b": vocabulary["a"]}))
    with pytest.raises(BadInput, match=r"vocab\.json: 'a': got id .*; delete tokenizer.json or this file"):
        read_tokenizer_files(tmp_path)


def test_different_chat_templates_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(text)
    for setting, notes in ((text, 0), (text + "x", 1)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": setting}))
        assert read_template(tmp_path) is not None
        notes_printed = capsys.readouterr().err.splitlines()
        assert [f"NOTE: {tmp_path}/chat_template.jinja: differs from" in line for line in notes_printed] == [
            True
        ] * notes


def test_both_config_files_add_end_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert end_ids(tmp_path) == {1, 2, 3}
