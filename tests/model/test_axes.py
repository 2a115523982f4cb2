"""Named axes: every parameter of every network has named axes, and the axes determine its shape."""

import pytest

from model.axes import Axes, Axis, axes_of
from model.config import ModelConfig
from model.counts import meta_network
from tests.model.architectures import MODERN
from tests.model.test_gpt import SMALL

NETWORKS = MODERN | {"GPT-2": SMALL}


@pytest.mark.parametrize("config", NETWORKS.values(), ids=NETWORKS)
def test_axes_have_the_shape_of_the_parameter(config: ModelConfig) -> None:
    for name, parameter in meta_network(config).named_parameters():
        assert axes_of(name, config).shape == parameter.shape, name


def test_axes_name_the_dimensions_of_the_network() -> None:
    config = MODERN["NanoChat"]  # this network has fewer key-value heads than query heads
    queries, keys = (heads * config.head_width for heads in config.qkv_heads[:2])
    assert keys < queries
    heads, kv_heads, _ = config.qkv_heads
    fused = (Axis("heads", queries, heads), Axis("kv_heads", keys, kv_heads), Axis("kv_heads", keys, kv_heads))
    width = Axis("embed", config.emb_dim)
    assert axes_of("blocks.1.attention.qkv.weight", config) == Axes(rows=fused, columns=width, embedding=False)
    assert axes_of("blocks.1.attention.qkv.bias", config) == Axes(rows=fused, columns=None, embedding=False)
    vocabulary = (Axis("vocab", config.padded_vocab_size),)
    assert axes_of("head.weight", config) == Axes(rows=vocabulary, columns=width, embedding=False)
    assert axes_of("token_embedding.weight", config) == Axes(rows=vocabulary, columns=width, embedding=True)
