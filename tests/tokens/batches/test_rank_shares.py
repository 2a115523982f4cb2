"""Shares of ranks: all micro-batches in order, as even as can be, cut where the sum's tree is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokens.batches.rank_shares import balance, longest_share, rank_shares


@given(st.integers(1, 600), st.data())
def test_shares_are_all_micro_batches_in_order_and_as_even_as_can_be(microbatches: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, microbatches))
    shares = rank_shares(microbatches, ranks)
    assert [number for share in shares for number in share] == list(range(microbatches))
    lengths = {len(share) for share in shares}
    assert len(shares) == ranks and 0 not in lengths
    assert max(lengths) == longest_share(microbatches, ranks) == -(-microbatches // ranks)
    assert balance(microbatches, ranks) == pytest.approx(microbatches / ranks / max(lengths))
    if microbatches % ranks == 0:
        assert lengths == {microbatches // ranks}


@pytest.mark.parametrize(
    ("microbatches", "ranks", "ends"),
    [
        (8, 3, [2, 5, 8]),
        (8, 6, [2, 4, 5, 6, 7, 8]),
        (12, 5, [3, 6, 9, 11, 12]),  # runs of three
        (7, 3, [3, 6, 7]),
    ],
)
def test_shares_end_at_large_subtrees(microbatches: int, ranks: int, ends: list[int]) -> None:
    assert [share.stop for share in rank_shares(microbatches, ranks)] == ends
