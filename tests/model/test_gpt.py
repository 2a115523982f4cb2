"""The network is GPT-2: its sizes, its arithmetic, its start."""

import math

import attrs
import pytest
import torch

from model.config import GPT2_SIZES, ModelConfig, flops_per_token, parameter_count
from model.gpt import GPT, initialize
from model.loss import NextTokenLoss
from model.naming import to_plain
from model.pretrained import load_plain, padded, unpadded

PUBLISHED_PARAMETERS = {"124M": 124_439_808, "350M": 354_823_168, "774M": 774_030_080, "1.5B": 1_557_611_200}
SMALL = ModelConfig(
    vocab_size=211, context_length=48, emb_dim=64, n_heads=4, n_layers=3, qkv_bias=True, tie_weights=True
)


def network(config: ModelConfig, seed: int = 1) -> GPT:
    model = GPT(config).eval()
    initialize(model, seed)
    return model


@pytest.mark.parametrize("size", PUBLISHED_PARAMETERS)
def test_parameter_counts_are_the_published_ones(size: str) -> None:
    assert parameter_count(GPT2_SIZES[size]) == PUBLISHED_PARAMETERS[size]


@pytest.mark.parametrize("change", [{}, {"tie_weights": False}, {"qkv_bias": False}])
def test_parameter_count_is_that_of_the_module_without_padding(change: dict[str, bool]) -> None:
    config = attrs.evolve(SMALL, **change)
    parameters = network(config).named_parameters()
    assert sum(unpadded(name, value, config).numel() for name, value in parameters) == parameter_count(config)


def test_flops_per_token_of_gpt2_small() -> None:
    # 6 x (84,934,656 in blocks + 38,597,376 in the head) + 12 x 12 x 768 x 1024
    assert flops_per_token(GPT2_SIZES["124M"]) == 6 * 123_532_032 + 113_246_208


@pytest.mark.parametrize("tied", [True, False])
def test_logits_match_hugging_face(tied: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=SMALL.vocab_size,
            n_positions=SMALL.context_length,
            n_embd=SMALL.emb_dim,
            n_layer=SMALL.n_layers,
            n_head=SMALL.n_heads,
            tie_word_embeddings=tied,
        )
    ).eval()
    with torch.no_grad():  # random biases and gains as well: at their start they hide mistakes
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    ours = GPT(attrs.evolve(SMALL, tie_weights=tied)).eval()
    load_plain(ours, to_plain(dict(theirs.state_dict())))
    tokens = torch.randint(SMALL.vocab_size, (3, 48))
    with torch.no_grad():
        difference = (ours(tokens) - theirs(tokens).logits).abs().max()
    assert difference < 1e-4


def test_a_token_does_not_see_those_after_it() -> None:
    model = network(SMALL)
    tokens = torch.randint(SMALL.vocab_size, (1, 48))
    changed = tokens.clone()
    changed[0, 30:] = (changed[0, 30:] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :30], after[:, :30])
    assert not torch.equal(before[:, 30:], after[:, 30:])


def test_initialisation_is_gpt2s() -> None:
    config = attrs.evolve(SMALL, emb_dim=256, context_length=256)
    weights = dict(network(config).named_parameters())
    residual = 0.02 / math.sqrt(2 * config.n_layers)
    wanted = {"attention.qkv": 0.02, "attention.output": residual, "mlp.up": 0.02, "mlp.down": residual}
    for name, std in wanted.items():
        assert weights[f"blocks.1.{name}.weight"].std().item() == pytest.approx(std, rel=0.03)
        assert weights[f"blocks.1.{name}.bias"].abs().max() == 0
    assert weights["position_embedding.weight"].std().item() == pytest.approx(0.01, rel=0.03)


def test_rows_beyond_the_vocabulary_stay_zero_and_change_nothing() -> None:
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
    cut = unpadded("head.weight", model.head.weight, config)
    assert torch.equal(padded("head.weight", cut, config), model.head.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"emb_dim": 65}, "emb_dim: got 65, wanted a multiple of n_heads, 4"),
        ({"n_layers": 0}, "n_layers: got 0, wanted an integer of at least 1"),
        ({"qkv_bias": 1}, "qkv_bias: got 1, wanted true or false"),
        ({"drop_rate": 1.0}, "drop_rate: got 1.0, wanted a number from 0 up to 0.99"),
        ({"context_length": True}, "context_length: got True, wanted an integer"),
    ],
)
def test_impossible_shapes_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attrs.evolve(SMALL, **change)
