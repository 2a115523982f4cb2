"""Device mesh of a job, and this process's place in it.

Each rank computes its own part of the global batch. Gradients are added up on one level, among all ranks, or on two:
inside each node, then across nodes, over which less is sent so. Parameters are whole on each rank (DDP), or sharded
over the ranks of the first level: FSDP2, called HSDP with two levels. Only training/parallel/ knows the mesh; everybody
else takes a `RankGroup`.
"""

from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from common.errors import BadInput
from training.parallel.process_group import Ranks, gather

INSIDE, ACROSS = "inside", "across"  # mesh dimensions: ranks of a node, or all; same place on each node


@attrs.frozen(kw_only=True)
class RankGroup:
    """Ranks that divide the global batch, or the rows of a tensor, and this process's place among them."""

    rank: int  # 0 .. size - 1
    size: int
    group: Any  # dist.ProcessGroup, in the order of these ranks

    def chunk(self, rows: int) -> int:
        """Return the rows of a shard, as torch.chunk divides them; the last ones may have less, or none."""
        return -(-rows // self.size)

    def first_row(self, rows: int) -> int:
        """Return the place of this rank's first row in the whole tensor."""
        return min(self.rank * self.chunk(rows), rows)


ALONE = RankGroup(rank=0, size=1, group=None)


@attrs.frozen(kw_only=True)
class Levels:
    """Ranks that add up gradients: first those of the first level, then, each its part, those across."""

    inside: RankGroup
    across: RankGroup = ALONE  # only this rank, where one level has all

    @property
    def size(self) -> int:
        return self.inside.size * self.across.size


def make_mesh(device: torch.device, node_size: int | None = None, timeout: timedelta | None = None) -> DeviceMesh:
    """Return the mesh of all ranks: on two levels with a `node_size`, the ranks of each node.

    `timeout`: of the groups of each level. With one level it adds no process group to the default one.
    """
    if node_size is not None:
        mesh = torch.arange(dist.get_world_size()).view(-1, node_size)
        groups = [_own_group(ranks.tolist(), timeout) for ranks in (mesh.T, mesh)]
        return DeviceMesh.from_group(groups, device.type, mesh=mesh, mesh_dim_names=(ACROSS, INSIDE))
    group = dist.group.WORLD
    assert group is not None  # torch: the process group is not initialized
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(INSIDE,))


def data_parallel_of() -> RankGroup:
    """Return this process's place among all ranks, which divide the global batch."""
    return RankGroup(rank=dist.get_rank(), size=dist.get_world_size(), group=dist.group.WORLD)


def levels_of(mesh: DeviceMesh) -> Levels:
    """Return this process's place on each level."""
    across = _dimension(mesh, ACROSS) if ACROSS in (mesh.mesh_dim_names or ()) else ALONE
    return Levels(inside=_dimension(mesh, INSIDE), across=across)


def inside_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the first level."""
    return mesh if mesh.ndim == 1 else mesh[INSIDE]


def wrapper_and_node_size(parallel: str, ranks: Ranks, *, ordered: bool) -> tuple[str, int | None]:
    """Return the wrapper, "ddp" or "fsdp", and for two levels the ranks of a node. Call it on every rank.

    `parallel`: as in train.json. "hsdp" is FSDP on two levels: on one node FSDP, on nodes of one rank DDP. DDP has two
    levels where nodes have equally many ranks, and more than one, and sums are `ordered`; else NCCL knows of nodes.
    Raises BadInput for "hsdp" on nodes of different sizes.
    """
    size = ranks.local_world_size
    if parallel == "fsdp" or size == ranks.world_size or (parallel == "ddp" and not ordered):  # then so on all ranks
        return "ddp" if parallel == "ddp" else "fsdp", None
    starts = gather(ranks, (size, ranks.rank - ranks.local_rank))
    alike = all(other == size and first % size == 0 for other, first in starts)
    if parallel == "hsdp":
        if not alike:
            sizes = sorted({other for other, _ in starts})
            raise BadInput(f'parallel: "hsdp": got nodes of {sizes} ranks, wanted as many on each; or use "fsdp"')
        return ("ddp", None) if size == 1 else ("fsdp", size)
    return "ddp", size if alike and size > 1 else None


def _own_group(groups: list[list[int]], timeout: timedelta | None) -> Any:
    """Return the process group that has this rank, of groups that all ranks make."""
    made = [dist.new_group(ranks, timeout=timeout) for ranks in groups]
    return next(group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks)


def _dimension(mesh: DeviceMesh, name: str) -> RankGroup:
    return RankGroup(rank=mesh.get_local_rank(name), size=mesh[name].size(), group=mesh.get_group(name))
