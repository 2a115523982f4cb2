"""Models that other programs have saved can be loaded, even if they store tied weights only once."""

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
from evaluation.shared.model_location import locate
from model.gpt import GPT
from model.stock import stock_class
from model.stock_weights import to_stock
from tests.model.architectures import QWEN3, SWIGLU
from tests.model.test_gpt import SMALL
from tests.model.test_naming import TOKENS, gpjt, nanogpt, network, plain_of

TIED = attrs.evolve(SMALL, tie_weights=True, qkv_bias=True)


class Shared(nn.Module):
    """A module with two names for the same tensor, like the model of gpjt/ddp-base-model-from-scratch."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(*weight.shape)
        self.out_head = nn.Linear(*reversed(weight.shape), bias=False)
        self.out_head.weight = self.tok_emb.weight


def difference(loaded: GPT, original: GPT) -> float:
    with torch.no_grad():
        return float((loaded(TOKENS) - original(TOKENS)).abs().max())


def write(folder: Path, weights: dict[str, Tensor], metadata: dict[str, str] | None = None, **config: Any) -> Path:
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps({"n_head": SMALL.n_heads} | config))
    return folder


def test_gpjt_tied_weights_load_under_either_name(tmp_path: Path) -> None:
    model = network(TIED)
    weights = {name.removeprefix("module."): value for name, value in gpjt(plain_of(model), TIED).items()}
    save_model(Shared(weights["tok_emb.weight"]), str(tmp_path / "shared"))
    with safe_open(tmp_path / "shared", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["tok_emb.weight"] == "out_head.weight"  # the library's choice
    weights["out_head.weight"] = weights.pop("tok_emb.weight")
    assert difference(load_foreign(write(tmp_path / "told", weights, metadata), None), model) < 1e-6
    configured = load_foreign(write(tmp_path / "configured", weights, tie_weights=True), None)
    assert configured.config.tie_weights and difference(configured, model) < 1e-6
    with pytest.raises(BadInput, match=re.escape("parameter token_embedding.weight is missing")):
        load_foreign(write(tmp_path / "untold", weights), None)


def test_nanogpt_defaults_to_tied_weights_and_exact_gelu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact, tanh = network(attrs.evolve(TIED, activation="gelu")), network(TIED)
    weights = nanogpt(plain_of(exact), TIED)
    del weights["_orig_mod.transformer.wte.weight"]
    loaded = load_foreign(write(tmp_path / "own", weights), None)
    assert loaded.config == exact.config and difference(loaded, exact) < 1e-6
    assert difference(loaded, tanh) > 1e-4
    message = capsys.readouterr().err
    assert (
        message.count("\n") == 1
        and "exact GELU is assumed" in message
        and '"activation_function": "gelu_new"' in message
    )
    older = load_foreign(write(tmp_path / "older", weights, activation_function="gelu_new"), None)
    assert older.config == tanh.config and difference(older, tanh) < 1e-6
    assert capsys.readouterr().err == ""


LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 211, "max_position_embeddings": 48, "hidden_size": 64},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 100},
    **{"rms_norm_eps": 1e-5, "rope_theta": 500.0, "tie_word_embeddings": True},
}
LLAMA_NETWORK = attrs.evolve(SMALL, **SWIGLU, n_kv_heads=2, mlp_width=100, rope_base=500.0)


def test_old_llama_in_bf16_loads_despite_its_buffers(tmp_path: Path) -> None:
    model = network(attrs.evolve(LLAMA_NETWORK, tie_weights=True))
    weights = {name: value.bfloat16() for name, value in to_stock(plain_of(model), model.config).items()}
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    loaded = load_foreign(write(tmp_path / "model", weights | buffer, **LLAMA), None)
    assert loaded.config == model.config
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert difference(loaded, model) < 0.1


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "ArceeForCausalLM", "NanoChatForCausalLM"])
def test_missing_config_keys_have_transformers_defaults(tmp_path: Path, name: str) -> None:
    import transformers

    shape = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    values = {key: LLAMA[key] for key in shape} | {"max_position_embeddings": 48, "num_key_value_heads": 2}
    kind = getattr(transformers, name)
    theirs = kind(kind.config_class(**values, head_dim=16, pad_token_id=None)).eval()
    weights = {key: value.clone() for key, value in theirs.state_dict().items()}
    values |= {"model_type": theirs.config.model_type}
    loaded = load_foreign(write(tmp_path / "model", weights, **values), None)
    with torch.no_grad():
        assert (loaded(TOKENS) - theirs(TOKENS).logits).abs().max() < 1e-5


def test_unsupported_bias_is_refused_unless_zero(tmp_path: Path) -> None:
    model = network(attrs.evolve(SMALL, **QWEN3 | {"qkv_bias": True}))
    weights = to_stock(plain_of(model), model.config)
    values = stock_class(model.config).config
    assert load_foreign(write(tmp_path / "model", weights, **values), None).config == model.config
    weights["model.layers.1.self_attn.o_proj.bias"][0] = 1.0
    message = r"blocks\.1\.attention\.output\.bias: got a bias, wanted zeros, because a Qwen3ForCausalLM"
    with pytest.raises(BadInput, match=message):
        load_foreign(write(tmp_path / "other", weights, **values), None)


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_biases_only_in_attention_or_mlp_load(tmp_path: Path, bias: str) -> None:
    model = network(attrs.evolve(LLAMA_NETWORK, biases=True, qkv_bias=bias == "attention_bias"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") and ("mlp" in name) != (bias == "mlp_bias"):
                parameter.zero_()
    weights = to_stock(plain_of(model), model.config)
    nonzero_weights = {name: value for name, value in weights.items() if ".bias" not in name or value.abs().max() > 0}
    values = LLAMA | {"tie_word_embeddings": False, bias: True}
    assert difference(load_foreign(write(tmp_path / "model", nonzero_weights, **values), None), model) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size: got None, wanted an integer of at least 1"),
        ({"head_dim": 32}, "head_dim: got 32, wanted None or 16"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', wanted 'silu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type: got 'llama3', wanted 'default'"),
        ({"rope_parameters": "linear"}, "rope_parameters: got 'linear', wanted an object"),
        ({"num_key_value_heads": 4}, "parameter blocks.0.attention.qkv.weight: k_proj: got 32 rows, wanted 64 rows"),
        ({"num_key_value_heads": 3}, "n_kv_heads: got 3, wanted a divisor of n_heads, 4"),
        ({"model_type": "qwen3"}, "parameter blocks.0.attention.key_norm.weight is missing"),
        ({"model_type": "arcee", "hidden_act": "relu2"}, "parameter blocks.0.mlp.gate.weight is unknown"),
        ({"model_type": "arcee"}, "hidden_act: got 'silu', wanted 'gelu_new', 'gelu', 'relu2' or 'gelu_pytorch_tanh'"),
        ({"model_type": "mistral"}, "model_type: got 'mistral', wanted"),
        ({"rms_norm_eps": "small"}, "norm_eps: got 'small', wanted a number above 0 up to 1"),
        ({"num_hidden_layers": 4}, "parameter blocks.3.attention.output.weight is missing"),
        ({"intermediate_size": 64}, "parameter blocks.0.mlp.up.weight: got shape (100, 64), wanted (64, 64)"),
    ],
)
def test_contradicting_stock_config_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = network(LLAMA_NETWORK)
    weights = to_stock(plain_of(model), model.config)
    values = LLAMA | {"tie_word_embeddings": False, "hidden_act": "silu"} | change
    with pytest.raises(BadInput, match=re.escape(message)):
        load_foreign(write(tmp_path / "model", weights, **values), None)


def checkpoint(folder: Path, **changes: Any) -> Path:
    """Write ckpt.pt as nanoGPT's train.py does for a compiled model."""
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


def test_nanogpt_checkpoint_loads_unchanged(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "out")
    model = network(attrs.evolve(TIED, activation="gelu"))
    assert locate(str(folder), None).path == folder
    assert difference(load_foreign(folder, None), model) < 1e-6
    (folder / "config.json").write_text('{"activation_function": "gelu_new"}')
    assert load_foreign(folder, None).config == TIED
    with pytest.raises(BadInput, match=re.escape(f"{folder / 'ckpt.pt'}: is a file; pass its folder: {folder}")):
        locate(str(folder / "ckpt.pt"), None)


def test_impossible_file_name_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot be read: File name too long"):
        locate("a" * 300, None)


class Code:
    """An object that makes an unpickler run code."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_pickle_runs_no_code_and_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(folder: Path) -> str:
        with pytest.raises(BadInput) as raised:
            load_foreign(folder, None)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    message = refused(checkpoint(tmp_path / "code", config=Code()))
    assert (
        "it contains more than tensors and plain values, so that loading it could run code" in message
        and 'python -c "import torch; ' in message
    )
    assert not (tmp_path / "ran").exists()
    assert "got no 'model' or no 'model_args'" in refused(checkpoint(tmp_path / "other", model_args=None))
    numbers = checkpoint(tmp_path / "numbers", model={"transformer.wte.weight": 1})
    assert "wanted only tensors" in refused(numbers)
    torn = checkpoint(tmp_path / "torn")
    (torn / "ckpt.pt").write_bytes((torn / "ckpt.pt").read_bytes()[:5000])
    assert "refused: the file is damaged" in refused(torn)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("n_layer", 5), ("n_layer", 0), ("n_embd", "x"), ("n_embd", []), ("vocab_size", 10**30)),
        *(("n_positions", -1), ("n_inner", 0), ("model_type", "opt"), ("activation_function", ["relu"])),
    ],
)
def test_config_that_contradicts_the_weights_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    folder = write(tmp_path / "own", nanogpt(plain_of(network(TIED)), TIED), **{key: value})
    problems = "the weights next to it have|wanted 'gpt2'|wanted 'gelu_new', 'gelu', 'relu2', 'gelu_pytorch_tanh'"
    with pytest.raises(BadInput, match=rf"config\.json: {key}: got .*({problems})"):
        load_foreign(folder, None)
