"""Weights of other programs as those programs save them: tied ones stored once, nanoGPT's activation and checkpoint."""

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from common.errors import BadInput
from evaluation.shared.foreign import load_foreign
from evaluation.shared.load import locate
from model.gpt import GPT
from tests.model.test_gpt import SMALL
from tests.model.test_naming import TOKENS, gpjt, nanogpt, network, plain_of

TIED = attrs.evolve(SMALL, tie_weights=True, qkv_bias=True)


class Shared(nn.Module):
    """Two names of one tensor, as gpjt/ddp-base-model-from-scratch has them."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(*weight.shape)
        self.out_head = nn.Linear(*reversed(weight.shape), bias=False)
        self.out_head.weight = self.tok_emb.weight


def difference(loaded: GPT, wanted: GPT) -> float:
    with torch.no_grad():
        return float((loaded(TOKENS) - wanted(TOKENS)).abs().max())


def write(folder: Path, weights: dict[str, Tensor], metadata: dict[str, str] | None = None, **config: Any) -> Path:
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps({"n_head": SMALL.n_heads} | config))
    return folder


def test_a_tied_model_of_gpjt_s_is_whole_under_either_name(tmp_path: Path) -> None:
    model = network(TIED)
    weights = {name.removeprefix("module."): value for name, value in gpjt(plain_of(model), TIED).items()}
    save_model(Shared(weights["tok_emb.weight"]), str(tmp_path / "shared"))
    with safe_open(tmp_path / "shared", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["tok_emb.weight"] == "out_head.weight"  # what the library does
    weights["out_head.weight"] = weights.pop("tok_emb.weight")
    assert difference(load_foreign(write(tmp_path / "told", weights, metadata), None), model) < 1e-6
    configured = load_foreign(write(tmp_path / "configured", weights, tie_weights=True), None)
    assert configured.config.tie_weights and difference(configured, model) < 1e-6
    with pytest.raises(BadInput, match=re.escape("parameter token_embedding.weight is missing")):
        load_foreign(write(tmp_path / "untold", weights), None)


def test_nanogpt_is_tied_and_has_its_own_activation_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact, tanh = network(attrs.evolve(TIED, activation="gelu")), network(TIED)
    weights = nanogpt(plain_of(exact), TIED)
    del weights["_orig_mod.transformer.wte.weight"]
    loaded = load_foreign(write(tmp_path / "own", weights), None)
    assert loaded.config == exact.config and difference(loaded, exact) < 1e-6
    assert difference(loaded, tanh) > 1e-4
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "exact GELU is assumed" in said and '"activation_function": "gelu_new"' in said
    older = load_foreign(write(tmp_path / "older", weights, activation_function="gelu_new"), None)
    assert older.config == tanh.config and difference(older, tanh) < 1e-6
    assert capsys.readouterr().err == ""


def test_an_unknown_activation_is_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", nanogpt(plain_of(network(TIED)), TIED), activation_function=["relu"])
    told = (
        f"{folder / 'config.json'}: activation_function: got ['relu'], wanted 'gelu_new', 'gelu', 'relu2', "
        "'gelu_pytorch_tanh'"
    )
    with pytest.raises(BadInput, match=re.escape(told)):
        load_foreign(folder, None)


def checkpoint(folder: Path, **changes: Any) -> Path:
    """Write ckpt.pt as nanoGPT's train.py does, of a compiled model."""
    model = network(attrs.evolve(TIED, activation="gelu"))
    folder.mkdir()
    content = {
        "model": nanogpt(plain_of(model), TIED),
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "model_args": {
            "n_layer": SMALL.n_layers,
            "n_head": SMALL.n_heads,
            "n_embd": SMALL.emb_dim,
            "block_size": SMALL.context_length,
            "bias": True,
        },
        "iter_num": 7,
        "best_val_loss": torch.tensor(3.2),
        "config": {"out_dir": "out", "learning_rate": 6e-4, "compile": True},
    }
    torch.save(content | changes, folder / "ckpt.pt")
    return folder


def test_a_checkpoint_of_nanogpt_is_read_as_it_is(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "out")
    model = network(attrs.evolve(TIED, activation="gelu"))
    assert locate(str(folder), None).path == folder
    assert difference(load_foreign(folder, None), model) < 1e-6
    (folder / "config.json").write_text('{"activation_function": "gelu_new"}')
    assert load_foreign(folder, None).config == TIED
    with pytest.raises(BadInput, match=re.escape(f"{folder / 'ckpt.pt'}: is a file, wanted its folder: {folder}")):
        locate(str(folder / "ckpt.pt"), None)


def test_a_name_that_no_file_can_have_is_one_line() -> None:
    with pytest.raises(BadInput, match="cannot be read: File name too long"):
        locate("a" * 300, None)


class Code:
    """What an unpickler would run."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_a_pickle_runs_no_code_and_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(folder: Path) -> str:
        with pytest.raises(BadInput) as found:
            load_foreign(folder, None)
        assert "\n" not in str(found.value)
        return str(found.value)

    said = refused(checkpoint(tmp_path / "code", config=Code()))
    assert "a pickle with more than tensors and plain values" in said and 'python -c "import torch; ' in said
    assert not (tmp_path / "ran").exists()
    assert "got no 'model' and 'model_args'" in refused(checkpoint(tmp_path / "other", model_args=None))
    assert "wanted nothing but tensors" in refused(
        checkpoint(tmp_path / "numbers", model={"transformer.wte.weight": 1})
    )
    torn = checkpoint(tmp_path / "torn")
    (torn / "ckpt.pt").write_bytes((torn / "ckpt.pt").read_bytes()[:5000])
    assert "refused: damaged" in refused(torn)


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_layer", 5), ("n_embd", "x"), ("vocab_size", 10**30), ("n_positions", -1), ("model_type", "opt")],
)
def test_a_configuration_that_the_weights_contradict_is_one_line(tmp_path: Path, key: str, value: Any) -> None:
    folder = write(tmp_path / "own", nanogpt(plain_of(network(TIED)), TIED), **{key: value})
    with pytest.raises(BadInput, match=rf"config\.json: {key}: got .*(the weights beside it have|wanted 'gpt2')"):
        load_foreign(folder, None)
