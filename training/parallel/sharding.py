"""Rows of a parameter, gradient or moment that this rank holds: whole under DDP, a shard of dimension 0 under FSDP2."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.parallel.process_group import RankGroup


def shards_of(value: Tensor) -> RankGroup | None:
    """Return the ranks that hold a tensor's rows, by its own placements; None where this one holds all of it."""
    if not isinstance(value, DTensor):
        return None
    [dimension] = [index for index, placement in enumerate(value.placements) if placement.is_shard(0)]
    mesh = value.device_mesh
    return RankGroup(rank=mesh.get_local_rank(dimension), size=mesh.size(dimension), group=mesh.get_group(dimension))


def full_tensor(value: Tensor) -> Tensor:
    """Return the whole tensor of a possibly sharded one. Collective under FSDP: call it on every rank."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def local_tensor(value: Tensor) -> Tensor:
    """Return this rank's part of a possibly sharded tensor; the whole of any other."""
    # Not to_local(): with gradients enabled, as in a training step, it makes a view that autograd records.
    return value._local_tensor if isinstance(value, DTensor) else value


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of this rank's part of a possibly sharded one, in the same memory; any other as it is.

    An operator on many DTensors costs a GPU's host milliseconds.
    """
    return nn.Parameter(local_tensor(parameter).detach()) if isinstance(parameter, DTensor) else parameter


def held_rows(value: Tensor) -> tuple[int, Tensor]:
    """Return the index of this rank's first row in the whole tensor, and the rows in its memory."""
    shards = shards_of(value)
    first = 0 if shards is None else shards.first_row(value.shape[0])
    return first, local_tensor(value).detach()


def checkpoint_rows(value: Tensor, node: RankGroup, *, replica: bool, shard: bool) -> tuple[int, Tensor]:
    """Return the index of the first row that this rank gives to a checkpoint, and these rows: maybe none.

    `replica`: whether the ranks of its node divide a tensor that each has whole; `shard`: whether it gives its shard of
    a sharded one. Else other nodes do, which have the same.
    """
    first, held = held_rows(value)
    if isinstance(value, DTensor):
        return first, held if shard else held[:0]
    own = node.first_row(len(held))
    return first + own, held[own : own + node.chunk(len(held))] if replica else held[:0]
