"""The device mesh of a job, this process's place in it, and the rows of sharded tensors that this process has.

Each data-parallel rank (`Ranks.data_parallel`) computes its own part of the global batch. Gradients are added up either
on one level, among all of these ranks, or on two levels: first inside each node and then across nodes, so that nodes
send less data to each other. Every rank has complete parameters (DDP), or the parameters are sharded over the ranks of
the first level (FSDP2, which is called HSDP with two levels). Only training/parallel/ knows the mesh; all other code
uses a `RankGroup`.
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
from training.parallel.process_group import ALONE, RankGroup, Ranks, gather, make_subgroup

# Mesh dimensions: INSIDE has the ranks of a node, or all ranks; ACROSS has the ranks with the same place on each node.
INSIDE, ACROSS = "inside", "across"


@attrs.frozen(kw_only=True)
class Levels:
    """The ranks that add up gradients.

    First, the ranks `inside` add up their gradients, and each of them gets a part of the sum. Then each rank adds its
    part to the corresponding parts from the ranks `across`.
    """

    inside: RankGroup
    across: RankGroup = ALONE  # contains only this rank if there is a single level

    @property
    def size(self) -> int:
        return self.inside.size * self.across.size


@attrs.frozen(kw_only=True, eq=False)
class Sharded:
    """A parameter that is divided into tensor shards, or a tensor of the same shape.

    Under FSDP, the shards of this rank may also be sharded by rows.
    """

    local_shards: list[tuple[ShardCut, Tensor]]
    cuts: list[ShardCut]  # the cuts of all shards, in the order of the shards
    all_gather: Callable[[Tensor], Tensor]  # this rank's stacked shards -> all shards, stacked
    shape: tuple[int, ...]  # shape of the complete tensor
    dtype: torch.dtype

    def full_tensor(self) -> Tensor:
        shards = self.all_gather(torch.stack([full_tensor(shard) for _, shard in self.local_shards]))
        full = shards.new_empty(self.shape)
        for cut, shard in zip(self.cuts, shards, strict=True):
            for local_rows, run in cut.whole_rows(0, len(shard)):
                within(full, run.rows, cut.columns).copy_(shard[local_rows])
        return full


@attrs.frozen
class HeldPiece:
    """A rank's part of some consecutive rows of a parameter."""

    parameter: str  # the parameter's name on the rank
    local_rows: range  # the piece's rows in the rank's part of the parameter
    rows: range  # the same rows, but row 0 is the first of the consecutive rows
    columns: range | None  # None: all columns


@attrs.frozen(kw_only=True)
class Spread:
    """How parameters are spread over the ranks that share the work of an update: complete on each rank, or in parts."""

    ranks: RankGroup = ALONE
    row_shards: int = 1  # under FSDP, the number of parts of each tensor shard
    tensor_shards: int = 1
    tensor_size: int = 1  # number of neighboring ranks among which tensor shards are divided

    @property
    def sharded(self) -> bool:
        return self.row_shards * self.tensor_size > 1

    @functools.cache  # noqa: B019  # the cached objects are small and refer to nothing else
    def pieces(self, name: str, axes: Axes, rows: range) -> tuple[tuple[HeldPiece, ...], ...]:
        """Return, for each rank, its pieces of the given rows of a parameter.

        A rank that holds none of the rows gets a single empty piece.
        """
        pieces_of_ranks = []
        for row_rank, tensor_rank in itertools.product(range(self.row_shards), range(self.tensor_size)):
            pieces, group = list[HeldPiece](), RankGroup(rank=row_rank, size=self.row_shards)
            shards_per_rank = self.tensor_shards // self.tensor_size
            for shard in range(shards_per_rank):
                cut = shard_cut(axes, self.tensor_shards, tensor_rank * shards_per_rank + shard)
                parameter = name if self.tensor_shards == 1 else f"{SHARDS}{shard}.{name}"
                first, chunk = group.first_row(cut.shape[0]), group.chunk(cut.shape[0])
                for local_rows, run in cut.whole_rows(first, min(chunk, cut.shape[0] - first)):
                    begin, end = max(run.rows.start, rows.start), min(run.rows.stop, rows.stop)
                    if begin < end:
                        local_begin = local_rows.start + begin - run.rows.start
                        part = range(begin - rows.start, end - rows.start)
                        local_part = range(local_begin, local_begin + len(part))
                        pieces.append(HeldPiece(parameter, local_part, part, cut.columns))
            pieces_of_ranks.append(tuple(pieces) or (HeldPiece(parameter, range(0), range(0), cut.columns),))
        return tuple(pieces_of_ranks)


ON_ONE_RANK = Spread()
Placed = Tensor | Sharded


def within(tensor: Tensor, rows: range, columns: range | None) -> Tensor:
    """Return a view of some rows and columns of a tensor; None means all columns."""
    row_slice = slice(rows.start, rows.stop)
    return tensor[row_slice] if columns is None else tensor[row_slice, columns.start : columns.stop]


def make_mesh(ranks: Ranks, node_size: int | None = None) -> DeviceMesh:
    """Return the mesh of the data-parallel ranks. Call it on every rank.

    With `node_size`, the number of ranks per node, the mesh has two levels.
    """
    group = ranks.data_parallel.group or dist.group.WORLD
    assert group is not None  # WORLD is None until the process group is initialized
    if node_size is None:
        return DeviceMesh.from_group(group, ranks.device.type, mesh_dim_names=(INSIDE,))
    mesh = torch.tensor(dist.get_process_group_ranks(group)).view(-1, node_size)
    places = torch.arange(ranks.world_size).view(-1, node_size, ranks.tensor.size)
    groups = [make_subgroup(places.permute(order).flatten(0, 1)).group for order in ((1, 2, 0), (0, 2, 1))]
    return DeviceMesh.from_group(groups, ranks.device.type, mesh=mesh, mesh_dim_names=(ACROSS, INSIDE))


def levels_of(mesh: DeviceMesh) -> Levels:
    across = _dimension(mesh, ACROSS) if ACROSS in (mesh.mesh_dim_names or ()) else ALONE
    return Levels(inside=_dimension(mesh, INSIDE), across=across)


def wrapper_and_node_size(parallel: str, ranks: Ranks, *, ordered: bool) -> tuple[str, int | None]:
    """Return the wrapper, "ddp" or "fsdp", and the number of data-parallel ranks per node if there are two levels.

    Call it on every rank. `parallel` is the key in train.json. "hsdp" is FSDP on two levels. On a single node, it is
    the same as "fsdp"; with one rank per node, it is the same as "ddp". DDP has two levels if sums are `ordered` and
    all nodes have the same number of ranks, which must be more than one. If sums are not ordered, NCCL takes the nodes
    into account by itself. Raises BadInput for "hsdp" on nodes of different sizes.
    """
    node_size, tensor_size = ranks.node.size, ranks.world_size // ranks.data_parallel.size  # neighbors share batches
    # If this condition is true on one rank, it is true on all of them.
    if parallel == "fsdp" or node_size == ranks.world_size or (parallel == "ddp" and not ordered):
        return "ddp" if parallel == "ddp" else "fsdp", None
    nodes = gather(ranks, (node_size, ranks.rank - ranks.node.rank))
    equal_nodes = all(size == node_size and first_rank % node_size == 0 for size, first_rank in nodes)
    equal_nodes = equal_nodes and node_size % tensor_size == 0
    data_parallel_size = node_size // tensor_size
    if parallel == "hsdp":
        if not equal_nodes:
            sizes = sorted({size for size, _ in nodes})
            raise BadInput(
                f'parallel: "hsdp": got nodes of {sizes} ranks, wanted the same number on each node; or use "fsdp"'
            )
        return ("ddp", None) if data_parallel_size == 1 else ("fsdp", data_parallel_size)
    return "ddp", data_parallel_size if equal_nodes and data_parallel_size > 1 else None


def shards_of(value: Tensor) -> RankGroup | None:
    """Return the ranks among which a tensor's rows are divided; None if this rank holds all rows."""
    if not isinstance(value, DTensor):
        return None
    [dimension] = [index for index, placement in enumerate(value.placements) if placement.is_shard(0)]
    mesh = value.device_mesh
    return RankGroup(rank=mesh.get_local_rank(dimension), size=mesh.size(dimension), group=mesh.get_group(dimension))


def full_tensor(value: Placed) -> Tensor:
    """Return the full tensor, gathering it if it is sharded.

    For a sharded tensor, this is a collective: call it on every rank.
    """
    return value.full_tensor().detach() if isinstance(value, DTensor | Sharded) else value.detach()


def local_tensor(value: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; any other tensor is returned unchanged."""
    # Not to_local(): when gradients are enabled, as in a training step, autograd would record the view.
    return value._local_tensor if isinstance(value, DTensor) else value


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter that shares the memory of this rank's part of a sharded parameter.

    The optimizer updates this parameter instead of the sharded one, because operators on DTensors are slow.
    """
    return nn.Parameter(local_tensor(parameter).detach()) if isinstance(parameter, DTensor) else parameter


def held_rows(value: Tensor) -> tuple[int, Tensor]:
    """Return the index of this rank's first row in the complete tensor, and the rows in this rank's memory."""
    shards = shards_of(value)
    first = 0 if shards is None else shards.first_row(value.shape[0])
    return first, local_tensor(value).detach()


def held_pieces(value: Placed) -> Iterator[tuple[range, range | None, Tensor]]:
    """Yield the parts of the complete tensor that this rank holds, as (rows, columns, the part in this rank's memory).

    The columns are None if the part has all columns.
    """
    if not isinstance(value, Sharded):
        first, local = held_rows(value)
        yield range(first, first + len(local)), None, local
        return
    for cut, shard in value.local_shards:
        first, local = held_rows(shard)
        for local_rows, run in cut.whole_rows(first, len(local)):
            yield run.rows, cut.columns, local[local_rows]


def checkpoint_rows(value: Placed, node: RankGroup, *, replica: bool, shard: bool) -> tuple[int, Tensor]:
    """Return the rows that this rank contributes to a checkpoint, possibly none, and the index of the first row.

    Arguments:
        value: the tensor. If it is in tensor shards, it is gathered first, so that each rank has the complete tensor.
        node: the ranks of this rank's node
        replica: whether this node writes the tensors that are complete on every rank; the node's ranks divide the rows
        shard: whether this rank writes its shard of a sharded tensor. If not, a rank of another node with the same
            shard writes it.
    """
    first, local = held_rows(full_tensor(value) if isinstance(value, Sharded) else value)
    if isinstance(value, DTensor):
        return first, local if shard else local[:0]
    offset = node.first_row(len(local))
    return first + offset, local[offset : offset + node.chunk(len(local))] if replica else local[:0]


def _dimension(mesh: DeviceMesh, name: str) -> RankGroup:
    return RankGroup(rank=mesh.get_local_rank(name), size=mesh[name].size(), group=mesh.get_group(name))
