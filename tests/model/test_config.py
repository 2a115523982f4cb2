"""Model configuration: parameter counts, FLOPs, and shapes that are refused by name."""

import attrs
import pytest

from model.config import GPT2_SIZES, flops_per_token, matmul_parameter_count, parameter_count
from model.pretrained import unpadded
from tests.model.test_gpt import SMALL, network

PUBLISHED_PARAMETERS = {"124M": 124_439_808, "350M": 354_823_168, "774M": 774_030_080, "1.5B": 1_557_611_200}


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


def test_matmul_parameters_are_those_of_the_linear_layers() -> None:
    config = attrs.evolve(SMALL, tie_weights=False, qkv_bias=False)
    named = network(config).named_parameters()
    linear = [unpadded(name, value, config) for name, value in named if value.dim() == 2 and "embedding" not in name]
    assert sum(value.numel() for value in linear) == matmul_parameter_count(config)


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
