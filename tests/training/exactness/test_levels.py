"""Determinism level of a run: by train.json, device and data-parallel size."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.errors import BadInput
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.exactness.levels import resolve_determinism
from training.parallel.process_group import Ranks


def ranks(world_size: int) -> Ranks:
    place = {"rank": 0, "local_rank": 0, "world_size": world_size, "local_world_size": world_size}
    return Ranks(**place, device=torch.device("cpu"), control=None, download=None)


@pytest.mark.parametrize(
    ("wanted", "device", "size", "level"),
    [
        (None, "cpu", 1, "elastic"),
        (None, "cpu", 4, "elastic"),
        (None, "cpu", 3, "run"),  # 12 micro-batches: a tree over 1, 2 or 4 ranks
        (None, "cuda", 4, "off"),
        ("run", "cpu", 3, "run"),
        ("elastic", "cuda", 2, "elastic"),
        ("off", "cpu", 1, "off"),
    ],
)
def test_the_default_is_the_strongest_level_that_costs_nothing(
    make_run: Callable[..., Path], wanted: str | None, device: str, size: int, level: str
) -> None:
    train = load_run(make_run(global_batch_size=24, determinism=wanted), []).train
    layout = make_plan(train, 32, size, {"x": 100_000}).layout
    assert resolve_determinism(train, layout, torch.device(device)) == level


def test_elastic_on_a_size_that_does_not_divide_the_tree_names_those_that_do(make_run: Callable[..., Path]) -> None:
    train = load_run(make_run(global_batch_size=24, determinism="elastic"), []).train
    layout = make_plan(train, 32, 3, {"x": 100_000}).layout
    sizes = "world size 3 does not divide; world sizes that do: 1, 2, 4; or"
    message = f"run/train.json: determinism elastic adds 12 micro-batches in one tree, which {sizes}"
    with pytest.raises(BadInput, match=message):
        resolve_determinism(train, layout, torch.device("cpu"))
