"""Batches of work distributed over the ranks, with the same bits on any number of them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from tqdm import tqdm

from training.parallel.process_group import Ranks, together

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def share(ranks: Ranks, batches: Sequence[Batch], work: Callable[[Batch], Result], unit: str = "batch") -> list[Result]:
    """Return `work` of each batch, in order, on every rank; call it on every rank.

    The batches must not depend on the number of ranks. On a CPU a rank gets one thread, as the number of threads
    changes sums. A BadInput of any rank is raised on all.
    """
    if ranks.device.type == "cpu":
        torch.set_num_threads(1)
    part = ranks.data_parallel
    mine = batches[part.rank :: part.size]
    bar = tqdm(mine, disable=None if ranks.coordinates else True, unit=unit, leave=False)
    shares = dict(together(ranks, lambda: (part.rank, [work(batch) for batch in bar])))
    return [shares[number % part.size][number // part.size] for number in range(len(batches))]
