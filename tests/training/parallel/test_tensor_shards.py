"""Tensor shards on ranks that share layers: gradients and their norm are the same as without shards."""

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
from training.config.key_groups import OptimizationOptions
from training.grad_norm import norm_of_shards
from training.optimizer import Optimizer
from training.parallel.mesh import full_tensor, within
from training.parallel.process_group import RankGroup, Ranks
from training.parallel.tensor_shards import TensorShards, in_shards, tensor_shards

# Four shards share two heads of keys and values, so each head is in two shards.
CONFIG = attrs.evolve(SMALL, n_layers=1, n_kv_heads=2, tie_weights=False)
SHARDS = 4


def cut_of(name: str, shard: int) -> ShardCut:
    return shard_cut(axes_of(name, CONFIG), SHARDS, shard)


def gradient(name: str, shard: int) -> Tensor:
    """Return the part of a parameter's gradient that one shard computes."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + shard)
    return torch.randn(cut_of(name, shard).shape, generator=generator)


def whole_gradient(name: str) -> Tensor:
    """Add the parts that the shards compute, in the order of the shards."""
    full = torch.zeros(axes_of(name, CONFIG).shape)
    for shard in range(SHARDS):
        cut, part = cut_of(name, shard), gradient(name, shard)
        for place, run in cut.whole_rows(0, len(part)):
            within(full, run.rows, cut.columns).add_(part[place])
    return full


CPU = torch.device("cpu")
ALONE = Ranks(rank=0, world_size=1, device=CPU, control=None, download=None)


def test_copies_share_their_gradient_and_count_once() -> None:
    network = meta_network(CONFIG)
    full_gradients = {name: whole_gradient(name) for name, _ in network.named_parameters()}

    def work(rank: int, tensor: RankGroup) -> tuple[dict[str, Tensor], float]:
        sharded = in_shards(NextTokenLoss(network), SHARDS, tensor).network
        shards = TensorShards(config=CONFIG, exchange=sharded.exchange, ranks=ALONE, row_ranks=None)
        parameters, places = {}, {}
        for name, parameter in sharded.named_parameters():
            places[name] = plain_name(name), sharded.exchange.local_shards[int(name.split(".")[1])]
            parameters[name] = nn.Parameter(torch.empty(parameter.shape))
            parameters[name].grad = gradient(*places[name])
        shards.add_shared(parameters)
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        for name, (plain, shard) in places.items():
            assert torch.equal(gradients[name], part_of(full_gradients[plain], cut_of(plain, shard))), name
        assert len(gradients) == SHARDS // tensor.size * len(full_gradients)
        full = {name: full_tensor(value) for name, value in shards.by_plain_name(gradients).items()}
        return full, norm_of_shards(shards, parameters).item()

    norms = set()
    for size in (1, 2, 4):
        for full, norm in on_threads(lambda rank, make, size=size: work(rank, make(f"of {size}", rank, size)), size):
            assert full.keys() == full_gradients.keys()
            assert all(torch.equal(value, full_gradients[name]) for name, value in full.items())
            norms.add(norm)
    [norm] = norms
    assert norm == pytest.approx(
        torch.cat([value.double().flatten() for value in full_gradients.values()]).norm().item()
    )


@pytest.mark.parametrize(("optimizer", "group_count"), [("adamw", 0), ("muon", 1)])
def test_only_shared_updates_make_a_process_group(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, group_count: int
) -> None:
    """Under FSDP with tensor shards, AdamW's update exchanges nothing, so it needs no process group."""
    groups: list[Tensor] = []

    def make_subgroup(places: Tensor) -> RankGroup:
        groups.append(places)
        return RankGroup(rank=0, size=4)

    monkeypatch.setattr("training.parallel.tensor_shards.make_subgroup", make_subgroup)
    pair = RankGroup(rank=0, size=2)
    ranks = Ranks(rank=0, world_size=4, data_parallel=pair, tensor=pair, device=CPU, control=None, download=None)
    network = meta_network(CONFIG)
    sharded = in_shards(NextTokenLoss(network), 2, pair).network
    shards = tensor_shards(sharded, ranks, pair)
    parameters = {name: nn.Parameter(torch.empty(value.shape)) for name, value in sharded.named_parameters()}
    axes = {name: axes_of(plain_name(name), CONFIG) for name in parameters}
    options = OptimizationOptions(optimizer=optimizer)
    Optimizer(parameters, axes, options, CPU, shards.make_spread)
    assert len(groups) == group_count
