"""On a CPU, the squares of each row are summed in an order that does not depend on the size of the blocks."""

import pytest
import torch

from training.exactness import row_sums
from training.exactness.row_sums import row_sums_of_squares


def test_rows_are_folded_in_halves() -> None:
    row = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))
    a, b, c, d, e = row.square()[0]
    assert torch.equal(row_sums_of_squares([row]), (((a + c) + (b + d)) + e).unsqueeze(0))


@pytest.mark.parametrize("elements", [1, 40, 77])
def test_blocks_do_not_change_the_bits(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in ((16, 33), (13,), (0, 4), (4, 3, 2))]
    sums = row_sums_of_squares(gradients)
    monkeypatch.setattr(row_sums, "BLOCK_ELEMENTS", elements)
    assert len(sums) == 33 and torch.equal(row_sums_of_squares(gradients), sums)
