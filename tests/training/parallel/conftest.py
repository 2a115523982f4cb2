"""A rank of a job without the others: torch's fake process group, whose collectives do nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank(rank: int, *, of: int) -> Iterator[None]:
    """Be one rank of so many."""
    dist.init_process_group("fake", rank=rank, world_size=of, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
