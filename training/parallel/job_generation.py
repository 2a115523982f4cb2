"""Generation of a job's processes: the identity of those that torchrun has started together.

On one node torchrun counts restarts. On several each torchrun counts its own, and none counts that a node has come or
gone, while the store, where the processes meet, may be the same and keep what earlier ones wrote.
"""

import hashlib
import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist

POLL_SECONDS = 0.1


def agree_on_generation(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that all ranks of a generation have, and no other. Call it on every rank.

    Each rank writes a name of its own. Rank 0 proposes those that it reads, which may be an earlier process's; every
    rank votes for a proposal that has its own; rank 0 decides once all have voted for the same.
    `store`: of the rendezvous (dist.Store). Raises dist.DistError where ranks are missing for so long.
    """
    own = uuid4().hex
    store.set(f"process {rank}", own)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if rank == 0 and (processes := _read(store, "process", world_size)):
            store.set("proposal", " ".join(processes))
        if proposal := _get(store, "proposal"):
            processes, name = proposal.split(), hashlib.sha256(proposal.encode()).hexdigest()[:16]
            if len(processes) == world_size and processes[rank] == own:
                store.set(f"vote {rank}", name)
                if rank == 0 and set(_read(store, "vote", world_size)) == {name}:
                    store.set("generation", name)
                if _get(store, "generation") == name:
                    return name
        time.sleep(POLL_SECONDS)
    raise dist.DistStoreError(f"not all of {world_size} ranks have met within {timeout}")


def _read(store: Any, key: str, world_size: int) -> list[str]:
    """Return every rank's value; none where one is missing."""
    keys = [f"{key} {rank}" for rank in range(world_size)]
    return [value.decode() for value in store.multi_get(keys)] if store.check(keys) else []


def _get(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
