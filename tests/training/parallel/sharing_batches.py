"""train.py on a mesh with a second dimension of two, as tensor parallelism has it: neighbors share their batches."""

from typing import Any

import attrs
import torch.distributed as dist

import train
from training.parallel import process_group
from training.parallel.process_group import RankGroup, Ranks

start = process_group.start


def start_sharing(*arguments: Any) -> Ranks:
    ranks = start(*arguments)
    halves = [dist.new_group(list(range(first, ranks.world_size, 2))) for first in range(2)]
    part = RankGroup(rank=ranks.rank // 2, size=ranks.world_size // 2, group=halves[ranks.rank % 2])
    return attrs.evolve(ranks, data_parallel=part)


process_group.start = start_sharing  # type: ignore[assignment]  # of any arguments
train.leave(train.main())
