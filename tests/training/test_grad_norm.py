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
def test_it_is_the_l2_norm_of_all_gradients(norm: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    wanted = torch.cat([gradient.double().flatten() for gradient in gradients()]).norm()
    assert norm(gradients()).item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_row_sums_of_all_shards_have_the_bits_and_the_order_of_whole_gradients(shards: int) -> None:
    places, longest = _row_positions(tuple(shape[0] for shape in SHAPES), shards, torch.device("cpu"))
    parts = [list(gradient.chunk(shards)) for gradient in gradients()]  # the last shards may have none of it
    gathered = []
    for rank in range(shards):
        own = torch.cat([row_sums_of_squares(part[rank : rank + 1]) for part in parts if rank < len(part)])
        gathered.append(torch.nn.functional.pad(own, (0, longest - len(own)), value=torch.nan))
    assert torch.equal(torch.cat(gathered)[places], row_sums_of_squares(gradients()))
