"""Emulated ranks: one rank in torch's fake process group, whose collectives do nothing, or several ranks in threads."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.training.conftest import Watched
from training.parallel.process_group import RankGroup, Ranks

MakeGroup = Callable[[str, int, int], RankGroup]  # name, rank, size -> group
Value = TypeVar("Value")


@contextmanager
def as_rank(rank: int, *, of: int) -> Iterator[None]:
    """Context manager in which this process is one rank of a fake process group."""
    dist.init_process_group("fake", rank=rank, world_size=of, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Context manager that counts how often each collective is called."""
    counts: Counter[str] = Counter()
    with Watched(lambda function, _: counts.update(re.findall(r"c10d\.(\w+)", str(function)))):
        yield counts


def default_ranks() -> Ranks:
    """Return the Ranks of this process in the default process group, on the CPU."""
    size, cpu = dist.get_world_size(), torch.device("cpu")
    return Ranks(rank=dist.get_rank(), world_size=size, device=cpu, control=None, download=None)


def on_threads(work: Callable[[int, MakeGroup], Value], ranks: int) -> list[Value]:
    """Call `work` for each rank in a thread of this process, and return the results in the order of the ranks.

    `work` gets the rank and a function that makes gloo groups.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]  # missing from its __all__

    def make_group(name: str, rank: int, size: int) -> RankGroup:
        prefixed_store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        group = dist.ProcessGroup(prefixed_store, rank, size)
        gloo = dist.ProcessGroupGloo(prefixed_store, rank, size, timedelta(seconds=60))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return RankGroup(rank=rank, size=size, group=group)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(lambda rank: work(rank, make_group), range(ranks)))
