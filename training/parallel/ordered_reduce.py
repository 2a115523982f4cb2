"""Ordered reduction of gradients: sums with the same bits on any number of ranks and under any wrapper.

The N micro-batches of a step are the leaves of one fixed tree: runs of `odd` leaves are added in order, where
N = odd x 2^k, and the 2^k results pairwise, neighbors first. A rank owns a contiguous run of leaves, so for any
data-parallel size D that divides 2^k its part is a subtree. Ranks exchange partial sums as they are (all-to-all), add
them in the same tree, and share the result (all-gather). IEEE addition commutes, so only the tree's shape matters. The
bytes moved are those of a ring all-reduce: 2 (D - 1) / D of the gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_api  # ReduceScatter, the interface of set_custom_reduce_scatter

from training.parallel.mesh import RankGroup
from training.parallel.process_group import all_gather_single


def odd_factor(count: int) -> int:
    """Return the largest odd divisor: the leaves to add in order before the pairwise tree begins."""
    return count // (count & -count)


def elastic_world_sizes(microbatches: int) -> list[int]:
    """Return the data-parallel sizes that give a step of so many micro-batches the same bits: powers of two."""
    return [1 << power for power in range((microbatches // odd_factor(microbatches)).bit_length())]


class LeafSum:
    """Sum of leaves, added one by one in the tree's shape; holds one partial sum a level instead of all leaves."""

    def __init__(self, run: int):
        self._run = run  # leaves added in order: `odd`
        self._leaves = 0
        self._pending: Tensor | None = None  # sum of the run in progress
        self._partial: list[Tensor] = []  # sums of ever smaller subtrees, as the ones of a binary counter

    def add(self, leaf: Tensor) -> None:
        """Add a copy of the next leaf: the caller may overwrite it afterwards."""
        # + 0.0 turns -0.0 into 0.0, which otherwise would depend on whether a sum began from nothing or from zero.
        self._pending = leaf + 0.0 if self._pending is None else self._pending + leaf
        self._leaves += 1
        if self._leaves % self._run:
            return
        merged, self._pending, runs = self._pending, None, self._leaves // self._run
        while runs % 2 == 0:
            merged = self._partial.pop() + merged
            runs //= 2
        self._partial.append(merged)

    def take(self) -> Tensor:
        """Return the sum of all leaves, a whole subtree, and reset."""
        assert self._pending is None and len(self._partial) == 1, (self._leaves, self._run, len(self._partial))
        self._leaves = 0
        return self._partial.pop()


def pairwise_sum(parts: Tensor) -> Tensor:
    """Return the sum over the first dimension, neighbors first; an odd last one joins at the next level."""
    while len(parts) > 1:
        pairs = parts[0 : len(parts) // 2 * 2 : 2] + parts[1::2]
        parts = pairs if len(parts) % 2 == 0 else torch.cat([pairs, parts[-1:]])
    return parts[0]


def ordered_reduce_scatter(buffer: Tensor, data_parallel: RankGroup) -> Tensor:
    """Return this rank's part of the sum of all ranks' buffers, in the tree's shape.

    `buffer` is 1-D, of a length that the data-parallel size divides.
    """
    received = torch.empty_like(buffer)
    dist.all_to_all_single(received, buffer, group=data_parallel.group)
    return pairwise_sum(received.view(data_parallel.size, -1))


def ordered_all_reduce(buffer: Tensor, data_parallel: RankGroup) -> Tensor:
    """Return the sum of all ranks' buffers, of any shape, in the tree's shape, on every rank."""
    if data_parallel.size == 1:
        return buffer
    flat = nn.functional.pad(buffer.flatten(), (0, -buffer.numel() % data_parallel.size))
    shard = ordered_reduce_scatter(flat, data_parallel)
    all_gather_single(flat, shard, group=data_parallel.group)
    return flat[: buffer.numel()].view_as(buffer)


class OrderedGradients:
    """Gradient sums of a step: collects the gradients of every micro-batch, reduces over ranks in the last one only.

    `run` is how many leaves of a rank are added in order before the pairwise tree begins: with the odd factor of all
    micro-batches the sum is elastic; with all leaves of a rank it repeats on any one data-parallel size.

    Gradients arrive through DDP's communication hook (`ddp_hook`), FSDP's reduce-scatter (`reduce_scatter`), or, on one
    rank, at the end of `microbatch`. Until the last micro-batch they stay here: `parameter.grad` is None (one rank) or
    zero, so that the next backward pass does not add to it.
    """

    def __init__(self, parameters: list[nn.Parameter], run: int, data_parallel: RankGroup):
        self._parameters = parameters
        self._data_parallel = data_parallel
        self._run = run
        self._sums: dict[Any, LeafSum] = {}
        self._last = False

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Context of one forward and backward pass."""
        self._last = last
        yield
        if self._data_parallel.size == 1:
            for parameter in self._parameters:
                assert parameter.grad is not None
                parameter.grad = self.collect(id(parameter), parameter.grad)

    def ddp_hook(
        self,
        _: Any,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP checks this annotation
    ) -> torch.futures.Future[Tensor]:
        """Replace DDP's all-reduce. Sums are kept by parameter: DDP regroups its buckets after the first step."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            total = self.collect(id(parameter), gradient)
            gradient.zero_() if total is None else gradient.copy_(total)
        if self._last:
            bucket.buffer().copy_(ordered_all_reduce(bucket.buffer(), self._data_parallel))
        # Collectives and DDP's own reading of the buffer are on one CUDA stream: the future need not carry an event.
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def reduce_scatter(self) -> "OrderedReduceScatter":
        """Return the replacement of one FSDP group's reduce-scatter."""
        return OrderedReduceScatter(self, self._data_parallel)

    def collect(self, key: Any, leaf: Tensor) -> Tensor | None:
        """Add a leaf to its sum; return the sum in the last micro-batch, else None."""
        total = self._sums.setdefault(key, LeafSum(self._run))
        total.add(leaf)
        return total.take() if self._last else None


class OrderedReduceScatter(_fsdp_api.ReduceScatter):
    """Reduce-scatter of one FSDP parameter group: ordered, and in the last micro-batch only."""

    def __init__(self, gradients: OrderedGradients, data_parallel: RankGroup):
        self._gradients = gradients
        self._data_parallel = data_parallel

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        total = self._gradients.collect(self, input_tensor)
        if total is None:
            output_tensor.zero_()
        else:
            output_tensor.copy_(ordered_reduce_scatter(total, self._data_parallel))
        return None
