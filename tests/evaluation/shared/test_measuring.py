"""Batches distributed over ranks: results come back in the order of the batches."""

from typing import Any

import pytest
import torch

from evaluation.shared import measuring
from training.parallel.process_group import Ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_results_are_in_order_and_each_batch_is_done_once(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    done: list[int] = []

    def work(batch: int) -> int:
        done.append(batch)
        return 10 * batch

    def other_ranks(ranks: Ranks, own: Any) -> list[tuple[int, list[int]]]:
        shares = [[10 * batch for batch in range(rank, 7, world_size)] for rank in range(world_size)]
        assert own() == (ranks.rank, shares[ranks.rank])
        return list(enumerate(shares))

    monkeypatch.setattr(measuring, "together", other_ranks)
    for rank in range(world_size):
        ranks = Ranks(rank=rank, world_size=world_size, device=torch.device("cpu"), control=None, download=None)
        assert measuring.share(ranks, range(7), work) == [0, 10, 20, 30, 40, 50, 60]
    assert sorted(done) == list(range(7))
