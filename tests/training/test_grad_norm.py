"""Global gradient norm: the L2 norm, with bits that do not depend on how rows are sharded."""

from collections.abc import Callable

import pytest
import torch

from training.exactness.row_sums import row_sums_of_squares
from training.grad_norm import _row_positions, fast_grad_norm, ordered_grad_norm

SHAPES = [(7, 5), (13,), (1, 1), (4, 3, 2), (16, 33)]


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("norm", [fast_grad_norm, ordered_grad_norm])
def test_grad_norm_is_the_l2_norm(norm: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    expected = torch.cat([gradient.double().flatten() for gradient in gradients()]).norm()
    assert norm(gradients()).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_gathered_row_sums_equal_those_of_full_gradients(shards: int) -> None:
    positions, shard_length = _row_positions(tuple(shape[0] for shape in SHAPES), shards, torch.device("cpu"))
    parts = [list(gradient.chunk(shards)) for gradient in gradients()]  # the last shards may have no rows of a gradient
    gathered = []
    for rank in range(shards):
        shard_sums = torch.cat([row_sums_of_squares(part[rank : rank + 1]) for part in parts if rank < len(part)])
        gathered.append(torch.nn.functional.pad(shard_sums, (0, shard_length - len(shard_sums)), value=torch.nan))
    assert torch.equal(torch.cat(gathered)[positions], row_sums_of_squares(gradients()))
