"""Generation: ranks that were started together agree on one name, whatever earlier ones have left in the store."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from training.parallel.job_generation import agree_on_generation

MINUTE = timedelta(minutes=1)


def agree(store: Any, world_size: int, draw: random.Random) -> list[str]:
    """Let so many ranks come at random times."""

    def come(rank: int, seconds: float) -> str:
        time.sleep(seconds)
        return agree_on_generation(store, rank, world_size, MINUTE)

    delays = [draw.uniform(0, 0.5) for _ in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(come, range(world_size), delays))


def test_generations_in_one_store_have_a_name_each() -> None:
    draw, store = random.Random(5), dist.HashStore()  # type: ignore[attr-defined]  # missing from its __all__
    names = []
    for world_size in (4, 4, 2, 4, 3, 1):  # nodes come and go; none removes what it has written
        [name] = set(agree(store, world_size, draw))
        names.append(name)
    assert len(set(names)) == len(names)


def test_a_missing_rank_is_an_error_in_time() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(dist.DistStoreError, match="not all of 2 ranks have met within 0:00:01"):
        agree_on_generation(store, 0, 2, timedelta(seconds=1))
