"""Device mesh of a job, and this process's data-parallel rank in it.

The mesh has one dimension, of all ranks: each holds a replica (DDP) or a shard (FSDP2) and computes its own part of the
global batch. Only training/parallel/ knows the mesh; everybody else takes a `RankGroup`.
"""

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

DATA = "data"  # mesh dimension over which the global batch is split


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


def make_mesh(device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks; it adds no process group to the default one."""
    group = dist.group.WORLD
    assert group is not None  # torch: the process group is not initialized
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(DATA,))


def data_parallel_of(mesh: DeviceMesh) -> RankGroup:
    """Return this process's place in the mesh's data dimension."""
    return RankGroup(rank=mesh.get_local_rank(DATA), size=mesh[DATA].size(), group=mesh.get_group(DATA))
