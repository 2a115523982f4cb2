"""Weights with other programs' parameter names give the same network."""

import re

import attrs
import pytest
import torch
from torch import Tensor

from model.axes import unpadded
from model.config import ModelConfig
from model.gpt import GPT, initialize
from model.naming import config_of, load_plain, to_plain
from model.stock_weights import to_stock
from tests.model.test_gpt import SMALL

VARIANTS = {
    f"{'tied' if tied else 'untied'}, {'with' if bias else 'without'} qkv bias": attrs.evolve(
        SMALL, tie_weights=tied, qkv_bias=bias
    )
    for tied in (True, False)
    for bias in (True, False)
}
TOKENS = torch.randint(SMALL.vocab_size, (3, SMALL.context_length), generator=torch.Generator().manual_seed(0))


def network(config: ModelConfig) -> GPT:
    """Return a network with random biases and gains, because the initial zeros and ones would hide mistakes."""
    model = GPT(config).eval()
    initialize(model, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = unpadded(name, parameter, config)
            rows.add_(torch.randn(rows.shape, generator=generator) * 0.05)
    return model


def plain_of(model: GPT) -> dict[str, Tensor]:
    return {name: unpadded(name, value.detach(), model.config) for name, value in model.named_parameters()}


def hugging_face(plain: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return weights as in GPT-2's files on the Hub: without the prefix of the class, and with causal masks."""
    state = {name.removeprefix("transformer."): value for name, value in to_stock(plain, config).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 4, 4) for layer in range(config.n_layers)}
    return state | masks | {"h.0.attn.masked_bias": torch.tensor(-1e4)}


def nanogpt(plain: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return weights as a compiled nanoGPT saves them: in the layout of nn.Linear, and always with a head."""
    state = to_stock(plain, config)
    for name, value in state.items():
        if re.search(r"c_(attn|proj|fc)\.weight", name):
            state[name] = value.t()  # not contiguous
    state.setdefault("lm_head.weight", plain["token_embedding.weight"].clone())
    return {f"_orig_mod.{name}": value for name, value in state.items()}


def openai(plain: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return weights with the names of OpenAI's release. It had no head, so a head gets a name in the same style."""
    state = {}
    for name, value in to_stock(plain, config).items():
        module, _, leaf = name.removeprefix("transformer.").rpartition(".")
        module = re.sub(r"^h\.(\d+)\.", r"h\1/", module)
        path = f"model/{module}".replace("attn.c", "attn/c").replace("mlp.c", "mlp/c")
        if module in ("wte", "wpe"):
            state[path] = value
        elif "ln_" in module:
            state[f"{path}/{'g' if leaf == 'weight' else 'b'}"] = value
        else:
            state[f"{path}/{leaf[0]}"] = value[None] if leaf == "weight" and "lm_head" not in module else value
    return state


def gpjt(plain: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return weights as gpjt/ddp-base-model-from-scratch saves them under DDP.

    Queries, keys and values are separate tensors.
    """
    modules = {
        **{"attention_norm": "norm1", "mlp_norm": "norm2", "attention.output": "att.out_proj"},
        **{"mlp.up": "ff.layers.0", "mlp.down": "ff.layers.2"},
        **{"token_embedding": "tok_emb", "position_embedding": "pos_emb", "head": "out_head"},
    }
    state = {"module.trf_blocks.0.att.mask": torch.ones(4, 4)}
    for name, value in plain.items():
        module, _, leaf = name.rpartition(".")
        block = re.match(r"blocks\.(\d+)\.", module)
        prefix, inner = (f"trf_blocks.{block[1]}.", module[block.end() :]) if block else ("", module)
        if inner == "attention.qkv":
            for part, rows in zip(("W_query", "W_key", "W_value"), value.chunk(3), strict=True):
                state[f"module.{prefix}att.{part}.{leaf}"] = rows
            continue
        if "norm" in inner:
            leaf = {"weight": "scale", "bias": "shift"}[leaf]
        state[f"module.{prefix}{modules.get(inner, inner)}.{leaf}"] = value
    return state


@pytest.mark.parametrize("naming", [hugging_face, nanogpt, openai, gpjt])
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_naming_gives_the_same_logits(variant: str, naming: object) -> None:
    assert callable(naming)
    model = network(VARIANTS[variant])
    plain = to_plain(naming(plain_of(model), model.config))
    config = config_of(plain, model.config.n_heads)
    assert config == (model.config if naming is gpjt else attrs.evolve(model.config, qkv_bias=True))
    loaded = GPT(config).eval()
    load_plain(loaded, plain)
    with torch.no_grad():
        difference = (loaded(TOKENS) - model(TOKENS)).abs().max()
    assert difference < 1e-6


def test_half_precision_is_converted_and_missing_biases_are_zero() -> None:
    model = network(attrs.evolve(SMALL, qkv_bias=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    state = {name: value for name, value in nanogpt(plain_of(model), model.config).items() if "bias" not in name}
    plain = to_plain(state)
    assert config_of(plain, 4) == model.config
    for name, value in plain_of(model).items():
        assert torch.equal(plain[name], value), name
    halves = {name: value.half() for name, value in state.items()}
    assert {value.dtype for value in to_plain(halves).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h.1.ln_1.weight": None}, "parameter blocks.1.attention_norm.weight is missing"),
        ({"wpe.weight": None}, "parameter position_embedding.weight is missing"),
        ({"h.0.ff.router.weight": torch.ones(2)}, "parameter h.0.ff.router.weight does not belong to a GPT-2"),
        ({"trf_blocks.0.att.W_query.weight": torch.ones(2, 2)}, "got only 1 of the three weight tensors of queries"),
    ],
)
def test_weights_of_other_networks_are_refused(change: dict[str, Tensor | None], message: str) -> None:
    model = network(SMALL)
    state = {**hugging_face(plain_of(model), model.config), **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        to_plain({name: value for name, value in state.items() if value is not None})
