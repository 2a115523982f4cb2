"""The model configuration: parameter counts, FLOPs, and impossible shapes."""

from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.axes import unpadded
from model.config import ACTIVATION_WORDS, GPT2_SIZES
from model.counts import flops_per_token, matmul_parameter_count, parameter_count
from tests.model.test_gpt import SMALL, network

PUBLISHED_PARAMETERS = {"124M": 124_439_808, "350M": 354_823_168, "774M": 774_030_080, "1.5B": 1_557_611_200}


@pytest.mark.parametrize("size", PUBLISHED_PARAMETERS)
def test_parameter_counts_equal_published_counts(size: str) -> None:
    assert parameter_count(GPT2_SIZES[size]) == PUBLISHED_PARAMETERS[size]


OPTIONS = st.fixed_dictionaries(
    {
        "activation": st.sampled_from(tuple(ACTIVATION_WORDS)),
        "mlp_width": st.sampled_from([None, 26, 96]),
        "norm": st.sampled_from(["layernorm", "rmsnorm"]),
        "positions": st.sampled_from(["learned", "rope"]),
        "n_kv_heads": st.sampled_from([None, 1, 2, 4]),
        "logit_softcap": st.sampled_from([None, 15.0]),
        **{
            name: st.booleans()
            for name in ("qkv_bias", "tie_weights", "biases", "norm_gain", "qk_norm", "embedding_norm")
        },
    }
)


@settings(max_examples=30)
@given(OPTIONS)
def test_parameter_counts_equal_the_networks_for_any_options(options: dict[str, Any]) -> None:
    config = attrs.evolve(SMALL, n_layers=5, **options)
    parameters = {name: unpadded(name, value, config) for name, value in network(config).named_parameters()}
    assert sum(value.numel() for value in parameters.values()) == parameter_count(config)
    head = "token_embedding.weight" if config.tie_weights else "head.weight"
    products = [value for name, value in parameters.items() if value.dim() == 2 and "embedding" not in name]
    products += [parameters[head]] * config.tie_weights
    assert sum(value.numel() for value in products) == matmul_parameter_count(config)


def test_flops_per_token_of_a_modern_block() -> None:
    config = attrs.evolve(
        GPT2_SIZES["124M"], positions="rope", n_kv_heads=4, activation="swiglu", mlp_width=2048, tie_weights=False
    )
    # Per block: queries 768 x 768, keys and values 768 x 256 each, output 768 x 768, three MLP matrices 768 x 2048
    matrices = 12 * (2 * 768 * 768 + 2 * 768 * 256 + 3 * 768 * 2048) + 50_257 * 768
    # The second term is for the scores of all 12 query heads.
    assert flops_per_token(config) == 6 * matrices + 12 * 12 * 768 * 1024


def test_flops_per_token_of_gpt2_small() -> None:
    # 6 x (84,934,656 in blocks + 38,597,376 in the head) + 12 x 12 x 768 x 1024
    assert flops_per_token(GPT2_SIZES["124M"]) == 6 * 123_532_032 + 113_246_208


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"emb_dim": 65}, "emb_dim: got 65, wanted a multiple of n_heads, 4"),
        ({"n_layers": 0}, "n_layers: got 0, wanted an integer of at least 1"),
        ({"qkv_bias": 1}, "qkv_bias: got 1, wanted true or false"),
        ({"drop_rate": 1.0}, "drop_rate: got 1.0, wanted a number from 0 up to 0.99"),
        ({"context_length": True}, "context_length: got True, wanted an integer"),
        ({"n_kv_heads": 3}, "n_kv_heads: got 3, wanted a divisor of n_heads, 4"),
        ({"n_kv_heads": 0}, "n_kv_heads: got 0, wanted an integer of at least 1"),
        (
            {"emb_dim": 60, "positions": "rope"},
            "positions: got .rope. with heads of width 15, wanted an even emb_dim / n_heads: RoPE rotates pairs of",
        ),
        ({"zero_init_head": True}, "zero_init_head: got true, wanted false, because tie_weights is true"),
        ({"activation": "relu"}, 'activation: got .relu., wanted "gelu_tanh", "gelu", "relu2" or "swiglu"'),
        ({"logit_softcap": 0.0}, "logit_softcap: got 0.0, wanted a number above 0"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attrs.evolve(SMALL, **change)
