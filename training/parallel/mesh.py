"""Device mesh of a job, this process's place in it, and its rows of sharded tensors.

Each data-parallel rank (`Ranks.data_parallel`) computes its own part of the global batch. Gradients are added up on one
level, among all of these, or on two: inside each node, then across nodes, over which less is sent so. Parameters are
whole on each rank (DDP), or sharded over the ranks of the first level: FSDP2, called HSDP with two levels. Only
training/parallel/ knows the mesh; everybody else takes a `RankGroup`.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from common.errors import BadInput
from model.axes import SHARDS, Axes, ShardCut, shard_cut
from training.parallel.process_group import ALONE, RankGroup, Ranks, gather, own_group

INSIDE, ACROSS = "inside", "across"  # mesh dimensions: ranks of a node, or all; same place on each node


@attrs.frozen(kw_only=True)
class Levels:
    """Ranks that add up gradients: first those of the first level, then, each its part, those across."""

    inside: RankGroup
    across: RankGroup = ALONE  # only this rank, where one level has all

    @property
    def size(self) -> int:
        return self.inside.size * self.across.size


@attrs.frozen(kw_only=True, eq=False)
class Sharded:
    """A parameter, or a tensor of its shape, in tensor shards; those of this rank may be sharded by rows under FSDP."""

    own: list[tuple[ShardCut, Tensor]]
    cuts: list[ShardCut]  # of all shards
    all_gather: Callable[[Tensor], Tensor]  # of this rank's shards -> all, stacked
    shape: tuple[int, ...]  # whole
    dtype: torch.dtype

    def full_tensor(self) -> Tensor:
        every = self.all_gather(torch.stack([full_tensor(part) for _, part in self.own]))
        whole = every.new_empty(self.shape)
        for cut, part in zip(self.cuts, every, strict=True):
            for place, run in cut.whole_rows(0, len(part)):
                within(whole, run.rows, cut.columns).copy_(part[place])
        return whole


@attrs.frozen
class HeldPiece:
    """Piece of consecutive rows of a parameter that a rank holds."""

    parameter: str  # its name on the rank
    held: range  # rows of the rank's part of it
    rows: range  # among the consecutive ones
    columns: range | None  # None: all


@attrs.frozen(kw_only=True)
class Spread:
    """Spread of parameters over the ranks that share out an update's work: whole on each, or in parts."""

    ranks: RankGroup = ALONE
    row_shards: int = 1  # under FSDP, of each tensor shard
    tensor_shards: int = 1
    tensor_size: int = 1  # ranks with tensor shards, neighbors

    @property
    def sharded(self) -> bool:
        return self.row_shards * self.tensor_size > 1

    @functools.cache  # noqa: B019  # a value without references
    def pieces(self, name: str, axes: Axes, rows: range) -> tuple[tuple[HeldPiece, ...], ...]:
        """Return the pieces of some rows of a parameter that each rank holds; one without rows where it holds none."""
        of_ranks = []
        for place, tensor_rank in itertools.product(range(self.row_shards), range(self.tensor_size)):
            own, group, local = [], RankGroup(rank=place, size=self.row_shards), self.tensor_shards // self.tensor_size
            for shard in range(local):
                cut = shard_cut(axes, self.tensor_shards, tensor_rank * local + shard)
                parameter = name if self.tensor_shards == 1 else f"{SHARDS}{shard}.{name}"
                first, chunk = group.first_row(cut.shape[0]), group.chunk(cut.shape[0])
                for held, run in cut.whole_rows(first, min(chunk, cut.shape[0] - first)):
                    begin, end = max(run.rows.start, rows.start), min(run.rows.stop, rows.stop)
                    if begin < end:
                        at = held.start + begin - run.rows.start
                        part = range(begin - rows.start, end - rows.start)
                        own.append(HeldPiece(parameter, range(at, at + len(part)), part, cut.columns))
            of_ranks.append(tuple(own) or (HeldPiece(parameter, range(0), range(0), cut.columns),))
        return tuple(of_ranks)


ON_ONE_RANK = Spread()
Placed = Tensor | Sharded


def within(whole: Tensor, rows: range, columns: range | None) -> Tensor:
    """Return rows and columns of a tensor; a view."""
    some = slice(rows.start, rows.stop)
    return whole[some] if columns is None else whole[some, columns.start : columns.stop]


def make_mesh(ranks: Ranks, node_size: int | None = None) -> DeviceMesh:
    """Return the mesh of the data-parallel ranks, on two levels with the size of a node. Call it on every rank."""
    group = ranks.data_parallel.group or dist.group.WORLD
    assert group is not None  # torch: the process group is not initialized
    if node_size is None:
        return DeviceMesh.from_group(group, ranks.device.type, mesh_dim_names=(INSIDE,))
    mesh = torch.tensor(dist.get_process_group_ranks(group)).view(-1, node_size)
    places = torch.arange(ranks.world_size).view(-1, node_size, ranks.tensor.size)
    groups = [own_group(places.permute(order).flatten(0, 1)).group for order in ((1, 2, 0), (0, 2, 1))]
    return DeviceMesh.from_group(groups, ranks.device.type, mesh=mesh, mesh_dim_names=(ACROSS, INSIDE))


def levels_of(mesh: DeviceMesh) -> Levels:
    across = _dimension(mesh, ACROSS) if ACROSS in (mesh.mesh_dim_names or ()) else ALONE
    return Levels(inside=_dimension(mesh, INSIDE), across=across)


def wrapper_and_node_size(parallel: str, ranks: Ranks, *, ordered: bool) -> tuple[str, int | None]:
    """Return the wrapper, "ddp" or "fsdp", and for two levels the data-parallel ranks of a node; call it on every rank.

    `parallel`: as in train.json. "hsdp" is FSDP on two levels: on one node FSDP, on nodes of one rank DDP. DDP has two
    levels where nodes have equally many ranks, and more than one, and sums are `ordered`; else NCCL knows of nodes.
    Raises BadInput for "hsdp" on nodes of different sizes.
    """
    node, tensor_size = ranks.node.size, ranks.world_size // ranks.data_parallel.size  # neighbors share batches
    if parallel == "fsdp" or node == ranks.world_size or (parallel == "ddp" and not ordered):  # then so on all ranks
        return "ddp" if parallel == "ddp" else "fsdp", None
    starts = gather(ranks, (node, ranks.rank - ranks.node.rank))
    alike = node % tensor_size == 0 and all(other == node and first % node == 0 for other, first in starts)
    size = node // tensor_size
    if parallel == "hsdp":
        if not alike:
            sizes = sorted({other for other, _ in starts})
            raise BadInput(f'parallel: "hsdp": got nodes of {sizes} ranks, wanted as many on each; or use "fsdp"')
        return ("ddp", None) if size == 1 else ("fsdp", size)
    return "ddp", size if alike and size > 1 else None


def shards_of(value: Tensor) -> RankGroup | None:
    """Return the ranks that hold a tensor's rows, by its own placements; None where this one holds all of it."""
    if not isinstance(value, DTensor):
        return None
    [dimension] = [index for index, placement in enumerate(value.placements) if placement.is_shard(0)]
    mesh = value.device_mesh
    return RankGroup(rank=mesh.get_local_rank(dimension), size=mesh.size(dimension), group=mesh.get_group(dimension))


def full_tensor(value: Placed) -> Tensor:
    """Return the whole tensor of a possibly sharded one. Collective where it is: call it on every rank."""
    return value.full_tensor().detach() if isinstance(value, DTensor | Sharded) else value.detach()


def local_tensor(value: Tensor) -> Tensor:
    """Return this rank's part of a possibly sharded tensor; the whole of any other."""
    # Not to_local(): with gradients enabled, as in a training step, it makes a view that autograd records.
    return value._local_tensor if isinstance(value, DTensor) else value


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of this rank's part of a sharded one, in its memory: operators on DTensors are slow."""
    return nn.Parameter(local_tensor(parameter).detach()) if isinstance(parameter, DTensor) else parameter


def held_rows(value: Tensor) -> tuple[int, Tensor]:
    """Return the index of this rank's first row in the whole tensor, and the rows in its memory."""
    shards = shards_of(value)
    first = 0 if shards is None else shards.first_row(value.shape[0])
    return first, local_tensor(value).detach()


def held_pieces(value: Placed) -> Iterator[tuple[range, range | None, Tensor]]:
    """Yield rows and columns, None for all, of the whole tensor that this rank holds, and its memory of them."""
    if not isinstance(value, Sharded):
        first, held = held_rows(value)
        yield range(first, first + len(held)), None, held
        return
    for cut, part in value.own:
        first, held = held_rows(part)
        for place, run in cut.whole_rows(first, len(held)):
            yield run.rows, cut.columns, held[place]


def checkpoint_rows(value: Placed, node: RankGroup, *, replica: bool, shard: bool) -> tuple[int, Tensor]:
    """Return the index of the first row that this rank gives to a checkpoint, and these rows: maybe none.

    `replica`: whether the ranks of its node divide a tensor that each has whole, as each then gets one in tensor
    shards; `shard`: whether it gives its shard of a sharded one. Else other nodes do, which have the same.
    """
    first, held = held_rows(full_tensor(value) if isinstance(value, Sharded) else value)
    if isinstance(value, DTensor):
        return first, held if shard else held[:0]
    own = node.first_row(len(held))
    return first + own, held[own : own + node.chunk(len(held))] if replica else held[:0]


def _dimension(mesh: DeviceMesh, name: str) -> RankGroup:
    return RankGroup(rank=mesh.get_local_rank(name), size=mesh[name].size(), group=mesh.get_group(name))
