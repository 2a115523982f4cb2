"""Rows that a rank holds and writes: those of torch.chunk, each row written once."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.training.parallel.conftest import as_rank, default_ranks
from training.parallel.mesh import make_mesh
from training.parallel.process_group import RankGroup
from training.parallel.sharding import checkpoint_rows, full_tensor, held_rows, local_tensor, shards_of

ROWS, SIZE = [1, 3, 4, 5, 7, 8, 13], 4


def whole(rows: int) -> torch.Tensor:
    return torch.arange(2.0 * rows).view(rows, 2)


@pytest.mark.parametrize("rows", ROWS)
def test_shards_are_those_of_torch_chunk(rows: int) -> None:
    chunks = whole(rows).chunk(SIZE)
    for rank in range(SIZE):
        shards = RankGroup(rank=rank, size=SIZE)
        first = shards.first_row(rows)
        own = whole(rows)[first : first + shards.chunk(rows)]
        assert torch.equal(own, chunks[rank] if rank < len(chunks) else whole(rows)[:0])


@pytest.mark.parametrize("rows", ROWS)
def test_of_a_replica_each_row_is_written_once_in_order(rows: int) -> None:
    parts = []
    for rank in range(SIZE):
        node = RankGroup(rank=rank, size=SIZE)
        first, part = checkpoint_rows(whole(rows), node, replica=True, shard=True)
        assert first == sum(map(len, parts))
        parts.append(part)
        assert not len(checkpoint_rows(whole(rows), node, replica=False, shard=True)[1])  # another node writes
    assert torch.equal(torch.cat(parts), whole(rows))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("rank", range(SIZE))
def test_of_a_shard_the_held_rows_are_held_and_written(rows: int, rank: int) -> None:
    with as_rank(rank, of=SIZE):
        mesh = make_mesh(default_ranks())
        sharded = distribute_tensor(whole(rows), mesh, [Shard(0)], src_data_rank=None)
        first, held = held_rows(sharded)
        assert torch.equal(held, whole(rows)[first : first + len(held)])
        assert torch.equal(held, local_tensor(sharded))
        assert len(held) == len(sharded.to_local())
        node = RankGroup(rank=rank, size=SIZE)
        other_first, written = checkpoint_rows(sharded, node, replica=False, shard=True)
        assert (other_first, written.tolist()) == (first, held.tolist())
        assert not len(checkpoint_rows(sharded, node, replica=True, shard=False)[1])  # another node writes


def test_the_sharded_dimension_of_a_mesh_counts_whatever_the_others_are() -> None:
    with as_rank(6, of=8):  # of two replicas, each of four shards: the third shard of the second one
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replica", "shard"))
        value = DTensor.from_local(whole(2), mesh, [Replicate(), Shard(0)], run_check=False)
        shards = shards_of(value)
        assert shards is not None
        assert (shards.rank, shards.size) == (2, 4)
        assert held_rows(value)[0] == 4


def test_a_whole_tensor_is_not_sharded() -> None:
    assert shards_of(whole(3)) is None
    first, held = held_rows(whole(3))
    assert first == 0
    assert torch.equal(held, whole(3))
    assert torch.equal(full_tensor(whole(3)), whole(3))
