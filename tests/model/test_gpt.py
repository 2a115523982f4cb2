"""The GPT-2 network: causality, initialization, padded rows and plain weights."""

import math

import attrs
import pytest
import torch
import torch.nn.functional as F

from model.axes import stored_rows, unpadded
from model.config import ModelConfig
from model.gpt import GPT, initialize
from model.loss import NextTokenLoss
from model.naming import load_plain

SMALL = ModelConfig(
    vocab_size=211, context_length=48, emb_dim=64, n_heads=4, n_layers=3, qkv_bias=True, tie_weights=True
)


def network(config: ModelConfig, seed: int = 1) -> GPT:
    model = GPT(config).eval()
    initialize(model, seed)
    return model


def test_tokens_do_not_see_later_tokens() -> None:
    model = network(SMALL)
    tokens = torch.randint(SMALL.vocab_size, (1, 48))
    changed = tokens.clone()
    changed[0, 30:] = (changed[0, 30:] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :30], after[:, :30])
    assert not torch.equal(before[:, 30:], after[:, 30:])


def test_initialization_matches_gpt2() -> None:
    config = attrs.evolve(SMALL, emb_dim=256, context_length=256)
    weights = dict(network(config).named_parameters())
    residual = 0.02 / math.sqrt(2 * config.n_layers)
    standard_deviations = {"attention.qkv": 0.02, "attention.output": residual, "mlp.up": 0.02, "mlp.down": residual}
    for name, std in standard_deviations.items():
        assert weights[f"blocks.1.{name}.weight"].std().item() == pytest.approx(std, rel=0.03)
        assert weights[f"blocks.1.{name}.bias"].abs().max() == 0
    assert weights["position_embedding.weight"].std().item() == pytest.approx(0.01, rel=0.03)


def test_rows_beyond_the_vocabulary_stay_zero() -> None:
    config = attrs.evolve(SMALL, tie_weights=False)
    model = network(config)
    tokens = torch.randint(config.vocab_size, (2, 48))
    assert config.padded_vocab_size == 256
    assert model(tokens).shape[-1] == config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    NextTokenLoss(model)(tokens, tokens).backward()
    optimizer.step()
    for weight in (model.token_embedding.weight, model.head.weight):
        assert weight[config.vocab_size :].abs().max() == 0
        assert weight[: config.vocab_size].abs().min() > 0


def test_default_network_has_the_bits_of_gpt2() -> None:
    model = network(SMALL)
    weights = dict(model.named_parameters())
    tokens = torch.randint(SMALL.vocab_size, (2, 48))

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def layer_norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (64,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = weights["token_embedding.weight"][tokens] + weights["position_embedding.weight"][:48]
    for block in (f"blocks.{layer}" for layer in range(3)):
        parts = linear(f"{block}.attention.qkv", layer_norm(f"{block}.attention_norm", x)).chunk(3, dim=-1)
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(f"{block}.attention.output", mixed)
        hidden = F.gelu(linear(f"{block}.mlp.up", layer_norm(f"{block}.mlp_norm", x)), approximate="tanh")
        x = x + linear(f"{block}.mlp.down", hidden)
    logits = F.linear(layer_norm("final_norm", x), weights["token_embedding.weight"])[..., :211]
    assert torch.equal(model(tokens), logits)
    assert len(weights) == 2 + 3 * 12 + 2  # checkpoints have these parameters


def test_zero_initialization_does_not_change_other_weights() -> None:
    config = attrs.evolve(SMALL, tie_weights=False)
    zero_config = attrs.evolve(config, zero_init_projections=True, zero_init_head=True)
    plain_weights, zero_weights = (dict(network(options).named_parameters()) for options in (config, zero_config))
    for name, weight in plain_weights.items():
        if name.endswith(("attention.output.weight", "mlp.down.weight")) or name == "head.weight":
            assert zero_weights[name].abs().max() == 0, name
        else:
            assert torch.equal(weight, zero_weights[name]), name


def test_autocast_rotates_and_normalizes_in_fp32() -> None:
    options = {"norm": "rmsnorm", "positions": "rope", "qk_norm": True, "embedding_norm": True, "n_kv_heads": 2}
    model = network(attrs.evolve(SMALL, **options))
    dtypes: dict[str, torch.dtype] = {}
    model.blocks[0].attention.register_forward_pre_hook(lambda _, inputs: dtypes.update(rotation=inputs[1].dtype))
    model.blocks[0].register_forward_hook(lambda _, __, output: dtypes.update(residual=output.dtype))
    tokens = torch.randint(SMALL.vocab_size, (2, 48))
    with torch.no_grad():
        logits = model(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(tokens) - logits).abs().max() < 0.02 * logits.abs().max()
    assert dtypes == {"rotation": torch.float32, "residual": torch.float32}


UNTIED = attrs.evolve(SMALL, tie_weights=False)


def plain_state(seed: int) -> dict[str, torch.Tensor]:
    return {name: unpadded(name, value.detach(), UNTIED) for name, value in network(UNTIED, seed).named_parameters()}


def test_plain_state_dict_loads_back_with_padding() -> None:
    loaded, state = network(UNTIED, seed=2), plain_state(1)
    assert state["head.weight"].shape[0] == state["token_embedding.weight"].shape[0] == UNTIED.vocab_size
    load_plain(loaded, state)
    for name, parameter in network(UNTIED, seed=1).named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
        assert stored_rows(name, len(parameter), UNTIED) == len(state[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.0.mlp.up.bias": None}, "parameter blocks.0.mlp.up.bias is missing"),
        ({"a.weight": torch.ones(1)}, "parameter a.weight is unknown"),
        ({"final_norm.bias": torch.ones(3)}, r"parameter final_norm.bias: got shape \(3,\), wanted \(64,\)"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change: dict[str, torch.Tensor | None], message: str) -> None:
    state = {name: value for name, value in (plain_state(1) | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        load_plain(network(UNTIED), state)
