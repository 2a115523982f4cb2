"""Device mesh of all ranks: data-parallel rank, size and group."""

import torch.distributed as dist

from tests.training.parallel.conftest import as_rank
from training.parallel.mesh import data_parallel_of


def test_every_rank_computes_a_part_of_the_global_batch_and_the_default_group_serves() -> None:
    with as_rank(5, of=8):
        data_parallel = data_parallel_of()
        assert (data_parallel.rank, data_parallel.size) == (5, 8)
        assert data_parallel.group is dist.group.WORLD
