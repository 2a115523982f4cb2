"""A rank of a job without the others: torch's fake process group, whose collectives do nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from training.parallel.process_group import Ranks


@contextmanager
def as_rank(rank: int, *, of: int) -> Iterator[None]:
    """Be one rank of so many."""
    dist.init_process_group("fake", rank=rank, world_size=of, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def default_ranks() -> Ranks:
    """Return this rank of the default process group, on the CPU."""
    size, cpu = dist.get_world_size(), torch.device("cpu")
    return Ranks(rank=dist.get_rank(), world_size=size, device=cpu, control=None, download=None)
