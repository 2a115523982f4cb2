"""The device mesh: data-parallel ranks, levels of gradient sums, and the rows of sharded tensors."""

import re

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from common.errors import BadInput
from tests.conftest import MakeRun, complete, metrics
from tests.training.parallel.conftest import as_rank, default_ranks
from training.parallel.mesh import (
    Levels,
    checkpoint_rows,
    full_tensor,
    held_rows,
    levels_of,
    local_tensor,
    make_mesh,
    shards_of,
    wrapper_and_node_size,
)
from training.parallel.process_group import RankGroup, Ranks

ROWS, SIZE = [1, 3, 4, 5, 7, 8, 13], 4


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_that_share_batches_keep_the_loss_curve(make_run: MakeRun, parallel: str) -> None:
    # With determinism "run", the bits depend on how many ranks the batch is divided among.
    curves = {}
    for name, ranks, tensor_parallel in (("two", 2, 1), ("sharing", 4, 2), ("four", 4, 1)):
        settings = {"determinism": "run", "parallel": parallel, "global_batch_size": 16}
        shards = {"tensor_shards": 2, "tensor_parallel": tensor_parallel}
        complete(run := make_run(name, {"drop_rate": 0.1}, **settings, **shards), "--hash-every", "1", ranks=ranks)
        keys = ("train_loss", "grad_norm", "validation_loss", "state_sha256")
        curves[name] = [metrics(run, key) for key in keys]
    assert curves["sharing"] == curves["two"] != curves["four"]


def test_mesh_has_one_level_or_two() -> None:
    with as_rank(5, of=8):
        ranks = default_ranks()
        mesh = make_mesh(ranks, 4)
        levels = levels_of(mesh)
        assert (levels.inside.rank, levels.inside.size) == (1, 4)
        assert (levels.across.rank, levels.across.size, levels.size) == (1, 2, 8)
        levels = levels_of(make_mesh(ranks))
        assert (levels.inside.rank, levels.inside.size, levels.size) == (5, 8, 8)
        assert levels == Levels(inside=levels.inside)
        half = RankGroup(rank=2, size=4, group=dist.new_group([1, 3, 5, 7]))
        levels = levels_of(make_mesh(attrs.evolve(ranks, data_parallel=half)))
        assert (levels.inside.rank, levels.inside.size, levels.size) == (2, 4, 4)


@pytest.mark.parametrize(
    ("parallel", "nodes", "ranks_per_batch", "expected"),
    [
        ("ddp", [8], 1, ("ddp", None)),
        ("hsdp", [8], 1, ("fsdp", None)),
        ("ddp", [4, 4], 1, ("ddp", 4)),
        ("fsdp", [4, 4], 1, ("fsdp", None)),
        ("hsdp", [4, 4], 1, ("fsdp", 4)),
        ("hsdp", [1, 1], 1, ("ddp", None)),
        ("ddp", [1, 1], 1, ("ddp", None)),
        ("ddp", [6, 6], 1, ("ddp", 6)),
        ("hsdp", [6, 6], 1, ("fsdp", 6)),
        ("ddp", [4, 2], 1, ("ddp", None)),
        ("hsdp", [4, 2], 1, 'parallel: "hsdp": got nodes of [2, 4] ranks, wanted the same number on each'),
        ("hsdp", [4, 4], 2, ("fsdp", 2)),
        ("ddp", [2, 2], 2, ("ddp", None)),
    ],
)
def test_levels_depend_on_the_nodes(
    parallel: str,
    nodes: list[int],
    ranks_per_batch: int,
    expected: tuple[str, int | None] | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [(size, sum(nodes[:node])) for node, size in enumerate(nodes) for _ in range(size)]
    monkeypatch.setattr("training.parallel.mesh.gather", lambda ranks, place: places)
    groups = {
        "node": RankGroup(rank=0, size=nodes[0]),
        "data_parallel": RankGroup(rank=0, size=sum(nodes) // ranks_per_batch),
    }
    cpu = torch.device("cpu")
    ranks = Ranks(rank=0, world_size=sum(nodes), device=cpu, control=None, download=None, **groups)
    if isinstance(expected, str):
        with pytest.raises(BadInput, match=re.escape(expected)):
            wrapper_and_node_size(parallel, ranks, ordered=True)
    else:
        assert wrapper_and_node_size(parallel, ranks, ordered=True) == expected
        # Without an ordered sum, DDP needs no process groups for nodes, so none are made.
        assert wrapper_and_node_size(parallel, ranks, ordered=False) == (
            ("ddp", None) if parallel == "ddp" else expected
        )


def numbered_rows(rows: int) -> torch.Tensor:
    return torch.arange(2.0 * rows).view(rows, 2)


@pytest.mark.parametrize("rows", ROWS)
def test_each_row_of_a_replica_is_written_once(rows: int) -> None:
    parts = []
    for rank in range(SIZE):
        node = RankGroup(rank=rank, size=SIZE)
        first, part = checkpoint_rows(numbered_rows(rows), node, replica=True, shard=True)
        assert first == sum(map(len, parts))
        parts.append(part)
        assert not len(checkpoint_rows(numbered_rows(rows), node, replica=False, shard=True)[1])  # another node writes
    assert torch.equal(torch.cat(parts), numbered_rows(rows))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("rank", range(SIZE))
def test_ranks_hold_and_write_their_shards_rows(rows: int, rank: int) -> None:
    with as_rank(rank, of=SIZE):
        mesh = make_mesh(default_ranks())
        sharded = distribute_tensor(numbered_rows(rows), mesh, [Shard(0)], src_data_rank=None)
        first, local = held_rows(sharded)
        assert torch.equal(local, numbered_rows(rows)[first : first + len(local)])
        assert torch.equal(local, local_tensor(sharded))
        node = RankGroup(rank=rank, size=SIZE)
        assert len(local) == len(sharded.to_local())
        assert torch.equal(local, numbered_rows(rows)[node.first_row(rows) :][: node.chunk(rows)])
        checkpoint_first, checkpoint_part = checkpoint_rows(sharded, node, replica=False, shard=True)
        assert (checkpoint_first, checkpoint_part.tolist()) == (first, local.tolist())
        assert not len(checkpoint_rows(sharded, node, replica=True, shard=False)[1])  # another node writes


def test_only_the_sharded_mesh_dimension_counts() -> None:
    with as_rank(6, of=8):  # rank 6 is in the second replica and has the third of 4 shards
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replica", "shard"))
        value = DTensor.from_local(numbered_rows(2), mesh, [Replicate(), Shard(0)], run_check=False)
        shards = shards_of(value)
        assert shards is not None
        assert (shards.rank, shards.size) == (2, 4)
        assert held_rows(value)[0] == 4


def test_a_whole_tensor_is_not_sharded() -> None:
    assert shards_of(numbered_rows(3)) is None
    first, local = held_rows(numbered_rows(3))
    assert first == 0
    assert torch.equal(local, numbered_rows(3))
    assert torch.equal(full_tensor(numbered_rows(3)), numbered_rows(3))
