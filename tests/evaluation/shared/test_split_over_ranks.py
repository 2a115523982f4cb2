"""Batches distributed over ranks: results come back in the order of the batches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import BadInput
from evaluation.shared import split_over_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_results_are_in_order_and_each_batch_is_done_once(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    done: list[int] = []

    def work(batch: int) -> int:
        done.append(batch)
        return 10 * batch

    def other_ranks(ranks: Any, own: Any) -> list[list[int]]:
        shares = [[10 * batch for batch in range(rank, 7, world_size)] for rank in range(world_size)]
        assert own() == shares[ranks.rank]
        return shares

    monkeypatch.setattr(split_over_ranks, "together", other_ranks)
    for rank in range(world_size):
        ranks: Any = SimpleNamespace(rank=rank, world_size=world_size, coordinates=False, device=torch.device("cpu"))
        assert split_over_ranks.share(ranks, range(7), work) == [0, 10, 20, 30, 40, 50, 60]
    assert sorted(done) == list(range(7))


def test_a_refused_batch_ends_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(batch: int) -> int:
        raise BadInput(f"batch {batch}")

    monkeypatch.setattr(split_over_ranks, "together", lambda ranks, own: [own()])
    ranks: Any = SimpleNamespace(rank=0, world_size=1, coordinates=True, device=torch.device("cpu"))
    with pytest.raises(BadInput, match="batch 0"):
        split_over_ranks.share(ranks, range(3), work)
