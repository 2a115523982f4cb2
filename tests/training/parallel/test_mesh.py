"""Device mesh: data-parallel ranks, and the levels on which they add up gradients."""

import re
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

from common.errors import BadInput
from tests.conftest import metrics, train
from tests.training.parallel.conftest import as_rank, default_ranks
from training.parallel.mesh import Levels, inside_mesh, levels_of, make_mesh, wrapper_and_node_size
from training.parallel.process_group import RankGroup, Ranks

SHARING_BATCHES = Path(__file__).with_name("sharing_batches.py")


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_four_ranks_of_which_two_share_each_batch_have_the_loss_curve_of_two(
    make_run: Callable[..., Path], parallel: str
) -> None:
    # With determinism "run" the bits are those of the number of ranks that divide the batch.
    curves = {}
    for name, ranks, script in (("two", 2, None), ("sharing", 4, SHARING_BATCHES), ("four", 4, None)):
        run = make_run(name, {"drop_rate": 0.1}, determinism="run", parallel=parallel, global_batch_size=16)
        done = train(run, "--hash-every", "1", ranks=ranks, **({} if script is None else {"script": script}))
        assert done.returncode == 0, done.stderr
        keys = ("train_loss", "grad_norm", "validation_loss", "state_sha256")
        curves[name] = [metrics(run, key) for key in keys]
    assert curves["sharing"] == curves["two"] != curves["four"]


def test_levels_are_nodes_and_places_on_them() -> None:
    with as_rank(5, of=8):
        mesh = make_mesh(default_ranks(), 4)
        levels = levels_of(mesh)
        assert (levels.inside.rank, levels.inside.size) == (1, 4)
        assert (levels.across.rank, levels.across.size, levels.size) == (1, 2, 8)
        assert inside_mesh(mesh).size() == 4


def test_one_level_has_all_data_parallel_ranks() -> None:
    with as_rank(5, of=8):
        ranks = default_ranks()
        levels = levels_of(make_mesh(ranks))
        assert (levels.inside.rank, levels.inside.size, levels.size) == (5, 8, 8)
        assert levels == Levels(inside=levels.inside)
        half = RankGroup(rank=2, size=4, group=dist.new_group([1, 3, 5, 7]))
        levels = levels_of(make_mesh(attrs.evolve(ranks, data_parallel=half)))
        assert (levels.inside.rank, levels.inside.size, levels.size) == (2, 4, 4)


@pytest.mark.parametrize(
    ("parallel", "nodes", "sharing", "chosen"),
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
        ("hsdp", [4, 2], 1, 'parallel: "hsdp": got nodes of [2, 4] ranks, wanted as many on each'),
        ("hsdp", [4, 4], 2, ("fsdp", 2)),
        ("ddp", [2, 2], 2, ("ddp", None)),
    ],
)
def test_levels_follow_from_the_nodes(
    parallel: str,
    nodes: list[int],
    sharing: int,
    chosen: tuple[str, int | None] | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [(size, sum(nodes[:node])) for node, size in enumerate(nodes) for _ in range(size)]
    monkeypatch.setattr("training.parallel.mesh.gather", lambda ranks, own: places)
    ranks = Ranks(
        rank=0,
        world_size=sum(nodes),
        node=RankGroup(rank=0, size=nodes[0]),
        data_parallel=RankGroup(rank=0, size=sum(nodes) // sharing),
        device=torch.device("cpu"),
        control=None,
        download=None,
    )
    if isinstance(chosen, str):
        with pytest.raises(BadInput, match=re.escape(chosen)):
            wrapper_and_node_size(parallel, ranks, ordered=True)
    else:
        assert wrapper_and_node_size(parallel, ranks, ordered=True) == chosen
        # Without an ordered sum DDP uses no groups of nodes: makes none
        assert wrapper_and_node_size(parallel, ranks, ordered=False) == (("ddp", None) if parallel == "ddp" else chosen)
