"""train.py with each NODE_SIZE ranks as a node, by the variables by which torchrun tells; all are on this machine.

WEIGHTED set: targets count differently, by the token.
"""

import os
from collections.abc import Iterator
from typing import Any

import attrs

import train
from tokens.batches.micro_batches import MicroBatch, micro_batches
from training import prefetch


def weighted(*arguments: Any) -> Iterator[MicroBatch]:
    for batch in micro_batches(*arguments):
        yield attrs.evolve(batch, weights=(batch.targets % 3).float(), mean_weight=0.5)


if "WEIGHTED" in os.environ:
    vars(prefetch)["micro_batches"] = weighted
if "RANK" in os.environ:
    rank, size = int(os.environ["RANK"]), int(os.environ["NODE_SIZE"])
    os.environ |= {
        "LOCAL_RANK": str(rank % size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": str(rank // size),
        "GROUP_WORLD_SIZE": str(int(os.environ["WORLD_SIZE"]) // size),
    }
train.leave(train.main())
