"""This rank's tensor shards of a network: exchange of activations, parameters by plain names, shared gradients.

Ranks that share layers are neighbors (`Ranks.tensor`), and each has the same number of consecutive shards. They
exchange activations with all-gathers and all-to-alls. Each rank adds up the received partial sums in the order of the
shards (model/shards.py). The exchange moves as many bytes as all-gathers and reduce-scatters would. If several shards
have the same element, such as a norm's gain, each shard computes a part of the element's gradient. These parts are
added in order after the reduction over data-parallel ranks, so that the copies of the element stay equal.
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
from training.parallel.process_group import RankGroup, Ranks, all_gather_single, make_subgroup


@attrs.frozen(kw_only=True, eq=False)
class TensorShards:
    config: ModelConfig
    exchange: ShardExchange
    ranks: Ranks
    row_ranks: RankGroup | None  # the ranks of FSDP, which divide the rows; None without FSDP

    @functools.cached_property
    def _cuts(self) -> dict[str, list[ShardCut]]:
        """Name of a parameter in the network -> the cuts of all its shards."""
        axes = {name: axes_of(name, self.config) for name, _ in meta_network(self.config).named_parameters()}
        shards = range(self.exchange.shards)
        return {
            name: [shard_cut(parameter_axes, len(shards), shard) for shard in shards]
            for name, parameter_axes in axes.items()
        }

    def by_plain_name(self, values: Mapping[str, Tensor]) -> dict[str, Sharded]:
        """Return this rank's shards of each parameter. The keys are the names that the network has without shards."""
        local_shards: defaultdict[str, list[Tensor]] = defaultdict(list)
        for name, value in values.items():
            local_shards[plain_name(name)].append(value)
        return {
            name: Sharded(
                local_shards=[
                    (self._cuts[name][shard], part)
                    for shard, part in zip(self.exchange.local_shards, parts, strict=True)
                ],
                cuts=self._cuts[name],
                all_gather=self.exchange.all_gather,
                shape=axes_of(name, self.config).shape,
                dtype=parts[0].dtype,
            )
            for name, parts in local_shards.items()
        }

    def make_spread(self) -> Spread:
        """Return how the parameters are spread over the ranks that share the work of an update.

        With FSDP, these ranks need an additional process group. Call this on every rank, and only for an optimizer that
        uses the group.
        """
        size, rows = self.ranks.tensor.size, 1 if self.row_ranks is None else self.row_ranks.size
        group = self.row_ranks or self.ranks.data_parallel
        if size > 1:  # neighbors
            places = torch.arange(self.ranks.world_size).view(-1, rows * size)
            group = make_subgroup(places) if rows > 1 else self.ranks.tensor
        return Spread(ranks=group, row_shards=rows, tensor_shards=self.exchange.shards, tensor_size=size)

    def add_shared(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add up, in place, the gradients of elements that several shards have. Call it on all tensor ranks."""
        shards = self.by_shard(parameters)
        for holders in sorted({run.holders for _, cut, _ in shards[0] for run in cut.rows} - {1}):
            copies = [
                [part for _, cut, value in shard_values for part in _held_by(holders, cut, value)]
                for shard_values in shards
            ]
            if not copies[0]:  # under FSDP, this rank and the ranks that share its layers may hold no such elements
                continue
            flat = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in copies])
            gathered = self.exchange.all_gather(flat)
            for shard, parts in zip(self.exchange.local_shards, copies, strict=True):
                first = shard // holders * holders
                totals = ordered_sum(gathered[first : first + holders]).split([part.numel() for part in parts])
                torch._foreach_copy_(parts, [total.view_as(part) for total, part in zip(totals, parts, strict=True)])

    @functools.cache  # noqa: B019  # the cache keeps only one object alive per process
    def counted_rows(self, names: tuple[str, ...], shard: int, device: torch.device) -> Tensor:
        """Return the rows of a shard that count in a sum, as indices into the concatenated rows of these parameters.

        If several shards have the same row, it counts only in the first of them.
        """
        places, begin = [], 0
        for run in (run for name in names for run in self._cuts[name][shard].rows):
            if shard % run.holders == 0:
                places.append(torch.arange(begin, begin + len(run.rows)))
            begin += len(run.rows)
        return torch.cat(places).to(device)

    def by_shard(self, parameters: Mapping[str, nn.Parameter]) -> list[list[tuple[str, ShardCut, nn.Parameter]]]:
        """Return, for each of this rank's shards, its parameters as (name in the network, cut, parameter)."""
        local_shards: list[list[tuple[str, ShardCut, nn.Parameter]]] = [[] for _ in self.exchange.local_shards]
        for name, parameter in parameters.items():
            plain, place = plain_name(name), int(name.split(".", 2)[1])
            local_shards[place].append((plain, self._cuts[plain][self.exchange.local_shards[place]], parameter))
        return local_shards


def in_shards(model: NextTokenLoss, shards: int, tensor: RankGroup) -> ShardedLoss:
    """Return this rank's part of a network that is divided into `shards` tensor shards. Allocates no memory."""
    local, size, group = shards // tensor.size, tensor.size, tensor.group

    def all_gather(values: Tensor) -> Tensor:
        gathered = values.new_empty((shards, *values.shape[1:]))
        all_gather_single(gathered, values.contiguous(), group=group)
        return gathered

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
    """Return the shards of this rank. `row_ranks` are the ranks of FSDP, which divide the rows; None without FSDP."""
    return TensorShards(config=network.config, exchange=network.exchange, ranks=ranks, row_ranks=row_ranks)


def _held_by(holders: int, cut: ShardCut, parameter: nn.Parameter) -> list[Tensor]:
    """Return this rank's rows of a parameter's gradient, but only the rows that exactly `holders` shards have."""
    assert parameter.grad is not None
    first, local = held_rows(parameter)
    gradient = local_tensor(parameter.grad)
    return [gradient[local_rows] for local_rows, run in cut.whole_rows(first, len(local)) if run.holders == holders]
