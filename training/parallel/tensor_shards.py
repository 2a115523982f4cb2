"""Tensor shards of a network on this rank: exchange of activations, parameters by plain names, shared gradients.

Ranks that share layers are neighbors (`Ranks.tensor`); each has as many shards, in their order. They exchange by
all-gathers and all-to-alls, after which each adds in the order of shards (model/shards.py): the bytes moved are those
of all-gathers and reduce-scatters. An element that several shards have, such as a norm's gain, gets a part of its
gradient from each: they are added in order after the reduction over data-parallel ranks, so that copies stay equal.
"""

import functools
from collections import defaultdict
from collections.abc import Mapping

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.axes import ShardCut, axes_of, plain_name, shard_cut
from model.config import ModelConfig
from model.counts import meta_network
from model.loss import NextTokenLoss
from model.sharded_loss import ShardedLoss
from model.shards import ShardedGPT, ShardExchange, ordered_sum
from training.parallel.mesh import Sharded, Spread, held_rows, local_tensor
from training.parallel.process_group import RankGroup, Ranks, all_gather_single, own_group


@attrs.frozen(kw_only=True, eq=False)
class TensorShards:
    config: ModelConfig
    exchange: ShardExchange
    ranks: Ranks
    row_ranks: RankGroup | None  # those of FSDP, which divide the rows

    @functools.cached_property
    def _cuts(self) -> dict[str, list[ShardCut]]:
        """Parts of all shards, by the parameter's name in the network."""
        axes = {name: axes_of(name, self.config) for name, _ in meta_network(self.config).named_parameters()}
        shards = range(self.exchange.shards)
        return {name: [shard_cut(own, len(shards), shard) for shard in shards] for name, own in axes.items()}

    def by_plain_name(self, values: Mapping[str, Tensor]) -> dict[str, Sharded]:
        """Return tensors of this rank's shards by the parameter's name in the network."""
        held: defaultdict[str, list[Tensor]] = defaultdict(list)
        for name, value in values.items():
            held[plain_name(name)].append(value)
        return {
            name: Sharded(
                own=[
                    (self._cuts[name][shard], part)
                    for shard, part in zip(self.exchange.local_shards, parts, strict=True)
                ],
                cuts=self._cuts[name],
                all_gather=self.exchange.all_gather,
                shape=axes_of(name, self.config).shape,
                dtype=parts[0].dtype,
            )
            for name, parts in held.items()
        }

    def make_spread(self) -> Spread:
        """Return the spread of the parameters over the ranks that share out an update's work. Collective.

        With FSDP these ranks need a process group of their own, which only some optimizers use: call it for those.
        """
        size, rows = self.ranks.tensor.size, 1 if self.row_ranks is None else self.row_ranks.size
        group = self.row_ranks or self.ranks.data_parallel
        if size > 1:  # neighbors
            places = torch.arange(self.ranks.world_size).view(-1, rows * size)
            group = own_group(places) if rows > 1 else self.ranks.tensor
        return Spread(ranks=group, row_shards=rows, tensor_shards=self.exchange.shards, tensor_size=size)

    def add_shared(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add up, in place, the gradients of elements that several shards have. Collective among tensor ranks."""
        shards = self.by_shard(parameters)
        for holders in sorted({run.holders for _, cut, _ in shards[0] for run in cut.rows} - {1}):
            copies = [[part for _, cut, value in own for part in _held_by(holders, cut, value)] for own in shards]
            if not copies[0]:  # under FSDP; then nor have the ranks that share layers with this one
                continue
            flat = torch.stack([torch.cat([part.flatten() for part in own]) for own in copies])
            every = self.exchange.all_gather(flat)
            for shard, own in zip(self.exchange.local_shards, copies, strict=True):
                first = shard // holders * holders
                totals = ordered_sum(every[first : first + holders]).split([part.numel() for part in own])
                torch._foreach_copy_(own, [total.view_as(part) for total, part in zip(totals, own, strict=True)])

    @functools.cache  # noqa: B019  # one object a process
    def counted(self, names: tuple[str, ...], shard: int, device: torch.device) -> Tensor:
        """Return the places of rows that count for a shard, of several the first, among those of all parameters."""
        places, begin = [], 0
        for run in (run for name in names for run in self._cuts[name][shard].rows):
            if shard % run.holders == 0:
                places.append(torch.arange(begin, begin + len(run.rows)))
            begin += len(run.rows)
        return torch.cat(places).to(device)

    def by_shard(self, parameters: Mapping[str, nn.Parameter]) -> list[list[tuple[str, ShardCut, nn.Parameter]]]:
        """Return the parameters of each of this rank's shards, with their names in the network."""
        found: list[list[tuple[str, ShardCut, nn.Parameter]]] = [[] for _ in self.exchange.local_shards]
        for name, parameter in parameters.items():
            plain, place = plain_name(name), int(name.split(".", 2)[1])
            found[place].append((plain, self._cuts[plain][self.exchange.local_shards[place]], parameter))
        return found


def in_shards(model: NextTokenLoss, shards: int, tensor: RankGroup) -> ShardedLoss:
    """Return the network in so many tensor shards, those of this rank, without memory."""
    local, size, group = shards // tensor.size, tensor.size, tensor.group

    def all_gather(own: Tensor) -> Tensor:
        every = own.new_empty((shards, *own.shape[1:]))
        all_gather_single(every, own.contiguous(), group=group)
        return every

    def all_to_all(parts: Tensor) -> Tensor:
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    exchange = ShardExchange(shards=shards, local_shards=range(tensor.rank * local, (tensor.rank + 1) * local))
    if size > 1:
        exchange = attrs.evolve(exchange, all_gather=all_gather, all_to_all=all_to_all)
    network = ShardedGPT(model.network.config, exchange)
    return ShardedLoss(network, recompute_blocks=model.recompute_blocks, chunks=model.chunks)


def tensor_shards(network: ShardedGPT, ranks: Ranks, row_ranks: RankGroup | None) -> TensorShards:
    """Return the shards of this rank; `row_ranks`: those of FSDP, which divide the rows."""
    return TensorShards(config=network.config, exchange=network.exchange, ranks=ranks, row_ranks=row_ranks)


def _held_by(holders: int, cut: ShardCut, parameter: nn.Parameter) -> list[Tensor]:
    """Return this rank's rows of a gradient that so many shards have."""
    assert parameter.grad is not None
    first, held = held_rows(parameter)
    gradient = local_tensor(parameter.grad)
    return [gradient[place] for place, run in cut.whole_rows(first, len(held)) if run.holders == holders]
