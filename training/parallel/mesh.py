"""Device mesh of a job, and this process's data-parallel rank in it.

The mesh has one dimension, of all ranks: each holds a replica (DDP) or a shard (FSDP2) and computes its own part of the
global batch. Only training/parallel/ knows the mesh; everybody else takes a `DataParallel`.
"""

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

DATA = "data"  # mesh dimension over which the global batch is split


@attrs.frozen(kw_only=True)
class DataParallel:
    """Part of the global batch that this process computes."""

    rank: int  # 0 .. size - 1
    size: int  # parts of the global batch
    group: Any  # dist.ProcessGroup of those that compute the parts, in the order of their ranks


def make_mesh(device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks; it adds no process group to the default one."""
    group = dist.group.WORLD
    assert group is not None  # torch: the process group is not initialized
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(DATA,))


def data_parallel_of(mesh: DeviceMesh) -> DataParallel:
    """Return this process's place in the mesh's data dimension."""
    return DataParallel(rank=mesh.get_local_rank(DATA), size=mesh[DATA].size(), group=mesh.get_group(DATA))
