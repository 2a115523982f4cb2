"""Tensor shards on ranks that share layers: shared gradients and their norm are those of the whole tensors."""

import zlib

import attrs
import pytest
import torch
from torch import Tensor, nn

from model.axes import ShardCut, axes_of, plain_name, shard_cut
from model.counts import meta_network
from model.loss import NextTokenLoss
from tests.model.test_gpt import SMALL
from tests.model.test_shards import part_of
from tests.training.parallel.conftest import on_threads
from training.grad_norm import norm_of_shards
from training.parallel.mesh import ON_ONE_RANK, full_tensor, within
from training.parallel.process_group import RankGroup
from training.parallel.tensor_shards import TensorShards, in_shards

CONFIG = attrs.evolve(SMALL, n_layers=1, n_kv_heads=2, tie_weights=False)  # two shards have the same keys and values
SHARDS = 4


def cut_of(name: str, shard: int) -> ShardCut:
    return shard_cut(axes_of(name, CONFIG), SHARDS, shard)


def gradient(name: str, shard: int) -> Tensor:
    """Return what one shard adds to the gradient of a parameter."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + shard)
    return torch.randn(cut_of(name, shard).shape, generator=generator)


def whole_gradient(name: str) -> Tensor:
    """Return the sum of what shards add, in their order."""
    whole = torch.zeros(axes_of(name, CONFIG).shape)
    for shard in range(SHARDS):
        cut, part = cut_of(name, shard), gradient(name, shard)
        for place, run in cut.whole_rows(0, len(part)):
            within(whole, run.rows, cut.columns).add_(part[place])
    return whole


def test_copies_of_an_element_get_the_sum_of_their_gradients_and_it_counts_once_on_any_number_of_ranks() -> None:
    network = meta_network(CONFIG)
    wanted = {name: whole_gradient(name) for name, _ in network.named_parameters()}

    def work(rank: int, tensor: RankGroup) -> tuple[dict[str, Tensor], float]:
        sharded = in_shards(NextTokenLoss(network), SHARDS, tensor).network
        shards = TensorShards(config=CONFIG, exchange=sharded.exchange, spread=ON_ONE_RANK)
        parameters, places = {}, {}
        for name, parameter in sharded.named_parameters():
            places[name] = plain_name(name), sharded.exchange.own[int(name.split(".")[1])]
            parameters[name] = nn.Parameter(torch.empty(parameter.shape))
            parameters[name].grad = gradient(*places[name])
        shards.add_shared(parameters)
        found = {name: parameter.grad for name, parameter in parameters.items()}
        for name, (plain, shard) in places.items():
            assert torch.equal(found[name], part_of(wanted[plain], cut_of(plain, shard))), name
        assert len(found) == SHARDS // tensor.size * len(wanted)
        whole = {name: full_tensor(value) for name, value in shards.by_plain_name(found).items()}
        return whole, norm_of_shards(shards, parameters).item()

    norms = set()
    for size in (1, 2, 4):
        for whole, norm in on_threads(lambda rank, make, size=size: work(rank, make(f"of {size}", rank, size)), size):
            assert whole.keys() == wanted.keys()
            assert all(torch.equal(value, wanted[name]) for name, value in whole.items())
            norms.add(norm)
    [norm] = norms
    assert norm == pytest.approx(torch.cat([value.double().flatten() for value in wanted.values()]).norm().item())
