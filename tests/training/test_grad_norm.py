"""Global gradient norm: the L2 norm, with bits that do not depend on how rows are sharded."""

import pytest
import torch

from training.grad_norm import _row_sums, fast_grad_norm, mean_over_ranks, ordered_grad_norm
from training.parallel import process_group
from training.parallel.mesh import data_parallel_of, make_mesh

SHAPES = [(7, 5), (13,), (1, 1), (4, 3, 2), (16, 33)]


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("norm", [fast_grad_norm, ordered_grad_norm])
def test_it_is_the_l2_norm_of_all_gradients(norm: object) -> None:
    assert callable(norm)
    wanted = torch.cat([gradient.double().flatten() for gradient in gradients()]).norm()
    assert norm(gradients()).item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_a_rows_sum_has_the_same_bits_in_a_shard(shards: int) -> None:
    for gradient in gradients():
        assert torch.equal(torch.cat([_row_sums(part) for part in gradient.chunk(shards)]), _row_sums(gradient))


def test_the_mean_of_one_rank_is_that_of_its_values() -> None:
    process_group.start("cpu", 60)
    try:
        values = torch.randn(6, generator=torch.Generator().manual_seed(0))
        assert torch.equal(mean_over_ranks(values, data_parallel_of(make_mesh(values.device))), values.mean())
    finally:
        process_group.stop()
