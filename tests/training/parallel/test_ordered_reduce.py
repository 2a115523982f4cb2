"""A single rank's sums follow the tree, with one partial sum per level. test_exchange.py tests several ranks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from training.parallel.exchange import exchanges
from training.parallel.mesh import Levels
from training.parallel.ordered_reduce import LeafSum, OrderedGradients
from training.parallel.process_group import ALONE
from training.parallel.sum_tree import SumTree


def leaves(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-6, 6, count)[torch.randperm(count, generator=generator)]
    return torch.randn(count, 33, generator=generator) * scale[:, None]


def tree_sum(parts: list[Any], run: int, add: Callable[[Any, Any], Any] = torch.add) -> Any:
    """Add in the documented order: each group of `run` parts in turn, and then neighboring sums, level by level."""
    level = [functools.reduce(add, parts[begin : begin + run]) for begin in range(0, len(parts), run)]
    while len(level) > 1:
        pairs = [add(*level[index : index + 2]) for index in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def test_leaf_sums_are_small_and_reusable() -> None:
    total = LeafSum(SumTree(24, 3), range(12))
    for _ in range(2):
        counts = []
        for number in range(1, 12):
            total.add([torch.full((2,), float(number))])
            counts.append(len(total._sums))
        assert counts == [1, 1, 1, 2, 2, 1, 2, 2, 2, 3, 3]
        separate, joined = total.take()
        assert separate == [] and [float(earlier[0][0]) for earlier in joined] == [21.0, 24.0, 21.0]


def test_one_ranks_gradients_are_summed_in_the_tree() -> None:
    parameters, tree = [nn.Parameter(torch.zeros(33)), nn.Parameter(torch.zeros(2))], SumTree(6, 3)
    gradients = OrderedGradients(parameters, tree, range(6), exchanges(tree, [range(6)], Levels(inside=ALONE)))
    parts = leaves(6, 0)
    for _ in range(2):
        for number, part in enumerate(parts):
            with gradients.microbatch(parameters, last=number == 5, idle=False):
                assert all(parameter.grad is None for parameter in parameters)
                parameters[0].grad, parameters[1].grad = part.clone(), torch.tensor([-0.0, 1.0])
        first, second = (parameter.grad for parameter in parameters)
        assert first is not None and second is not None
        assert torch.equal(first, tree_sum(list(parts), 3))
        assert second.tolist() == [0.0, 6.0]
        for parameter in parameters:
            parameter.grad = None
