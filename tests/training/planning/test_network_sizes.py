"""Sizes that are counted on the meta device equal those of a real network, for any number of layers."""

import math
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import BadInput
from model.config import ModelConfig
from model.counts import parameter_count
from model.gpt import GPT
from model.shards import ShardedGPT, ShardExchange
from tests.conftest import TINY_MODEL
from training.planning.network_sizes import network_sizes

TINY = ModelConfig(**TINY_MODEL)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_state_equal_those_of_a_real_network(layers: int, tied: bool) -> None:
    config = attrs.evolve(TINY, n_layers=layers, tie_weights=tied)
    sizes, real = network_sizes(config), sum(parameter.numel() for parameter in GPT(config).parameters())
    assert sizes.outer_parameters + layers * sizes.block_parameters == real >= parameter_count(config)
    assert sizes.state_bytes("adamw", layers) == 2 * 4 * real


def test_number_of_layers_does_not_change_a_block() -> None:
    assert network_sizes(attrs.evolve(TINY, n_layers=1)) == network_sizes(attrs.evolve(TINY, n_layers=5))


@pytest.mark.parametrize(("shards", "ranks"), [(2, 2), (4, 2), (4, 1)])
def test_sizes_of_tensor_shards_equal_those_of_real_shards(shards: int, ranks: int) -> None:
    config = attrs.evolve(TINY, n_heads=4, n_kv_heads=2)
    exchange = ShardExchange(shards=shards, local_shards=range(shards // ranks))
    sizes = network_sizes(config, shards, ranks)
    real = sum(parameter.numel() for parameter in ShardedGPT(config, exchange).parameters())
    assert sizes.parameters(config.n_layers) == real > network_sizes(config).parameters(config.n_layers) // ranks
    assert sizes.state_bytes("adamw", config.n_layers) == 2 * 4 * real
    assert sizes.attention_width == config.emb_dim // ranks


def test_muon_keeps_one_moment_of_block_matrices() -> None:
    sizes = network_sizes(TINY)
    matrices = sum(math.prod(axes.shape) for axes in sizes.block.values() if len(axes.shape) == 2)
    assert matrices > 0
    # The difference is AdamW's second moment of two layers, in fp32.
    assert sizes.state_bytes("adamw", 2) - sizes.state_bytes("muon", 2) == 2 * 4 * matrices


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "attn_mask": torch.ones(32, 32, dtype=torch.bool)}])
def test_attention_of_unknown_cost_is_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    def attend(*heads: Tensor, **_: Any) -> Tensor:
        return F.scaled_dot_product_attention(*heads, **options)

    monkeypatch.setattr("model.gpt.F", SimpleNamespace(**{**vars(F), "scaled_dot_product_attention": attend}))
    with pytest.raises(BadInput, match=r"^model\.json: got attention with a mask or without is_causal, wanted causal"):
        network_sizes(attrs.evolve(TINY, mlp_width=24))  # a network that no other test has, because results are cached
