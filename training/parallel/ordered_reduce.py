"""Sums whose bits do not depend on how many ranks take part, nor on the wrapper.

The N micro-batches of a step are the leaves of one fixed tree: runs of `odd` leaves are added in order, where
N = odd x 2^k, and the 2^k results pairwise, neighbours first. A rank owns a contiguous run of leaves, so on any world
size that divides 2^k its part is a subtree; partial sums of ranks are exchanged as they are (all-to-all), added in the
same tree, and shared again (all-gather). IEEE addition commutes, so only the tree's shape matters. The bytes moved are
those of a ring all-reduce: 2 (W - 1) / W of the gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_api  # ReduceScatter, the interface of set_custom_reduce_scatter

from model.gpt import GPT
from training.parallel.process_group import all_gather_single


def odd_factor(count: int) -> int:
    """Return the largest odd divisor: how many leaves are added in order before the pairwise tree begins."""
    return count // (count & -count)


def elastic_world_sizes(microbatches: int) -> list[int]:
    """Return the world sizes on which a step of so many micro-batches has the same bits: powers of two."""
    return [1 << power for power in range((microbatches // odd_factor(microbatches)).bit_length())]


class LeafSum:
    """Adds leaves one by one in the tree's shape, holding one partial sum a level instead of all leaves."""

    def __init__(self, run: int):
        self._run = run  # leaves added in order: `odd`
        self._leaves = 0
        self._pending: Tensor | None = None  # of the run in progress
        self._partial: list[Tensor] = []  # sums of ever smaller subtrees, as the ones of a binary counter

    def add(self, leaf: Tensor) -> None:
        """Add the next leaf; it is copied, so its memory can be used again."""
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
        """Return the sum of all leaves, a whole subtree, and begin anew."""
        assert self._pending is None and len(self._partial) == 1, (self._leaves, self._run, len(self._partial))
        self._leaves = 0
        return self._partial.pop()


def pairwise_sum(parts: Tensor) -> Tensor:
    """Return the sum over the first dimension, neighbours first; of an odd number the last one waits."""
    while len(parts) > 1:
        pairs = parts[0 : len(parts) // 2 * 2 : 2] + parts[1::2]
        parts = pairs if len(parts) % 2 == 0 else torch.cat([pairs, parts[-1:]])
    return parts[0]


def ordered_reduce_scatter(buffer: Tensor, world_size: int) -> Tensor:
    """Return this rank's 1/W of the sum of all ranks' buffers, 1-D of a length that W divides, in the tree's shape."""
    received = torch.empty_like(buffer)
    dist.all_to_all_single(received, buffer)
    return pairwise_sum(received.view(world_size, -1))


def ordered_all_reduce(buffer: Tensor, world_size: int) -> Tensor:
    """Return the sum of all ranks' buffers, of any shape, in the tree's shape, on every rank."""
    if world_size == 1:
        return buffer
    flat = nn.functional.pad(buffer.flatten(), (0, -buffer.numel() % world_size))
    shard = ordered_reduce_scatter(flat, world_size)
    all_gather_single(flat, shard)
    return flat[: buffer.numel()].view_as(buffer)


class OrderedGradients:
    """Collects the gradients of every micro-batch of a step, and reduces them in the last one only.

    `run` is how many leaves of a rank are added in order before the pairwise tree begins: the odd factor of all
    micro-batches makes the sum elastic; all leaves of a rank make it the same on one world size, whichever that is.
    """

    def __init__(self, network: GPT, run: int, world_size: int):
        self._network = network
        self._world_size = world_size
        self._run = run
        self._sums: dict[Any, LeafSum] = {}
        self._last = False

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Around one forward and backward."""
        self._last = last
        yield
        if self._world_size == 1:
            for parameter in self._network.parameters():
                assert parameter.grad is not None
                parameter.grad = self.collect(id(parameter), parameter.grad)

    def ddp_hook(
        self,
        _: Any,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP checks this annotation
    ) -> torch.futures.Future[Tensor]:
        """Stand in for DDP's all-reduce. Sums are kept by parameter: DDP regroups its buckets after the first step."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            total = self.collect(id(parameter), gradient)
            gradient.zero_() if total is None else gradient.copy_(total)
        if self._last:
            bucket.buffer().copy_(ordered_all_reduce(bucket.buffer(), self._world_size))
        # Collectives and DDP's own reading of the buffer are on one CUDA stream: the future need not carry an event.
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def reduce_scatter(self) -> "OrderedReduceScatter":
        """Return what stands in for one FSDP group's reduce-scatter."""
        return OrderedReduceScatter(self, self._world_size)

    def collect(self, key: Any, leaf: Tensor) -> Tensor | None:
        """Add a leaf to its sum; return the sum in the last micro-batch, else None."""
        total = self._sums.setdefault(key, LeafSum(self._run))
        total.add(leaf)
        return total.take() if self._last else None


class OrderedReduceScatter(_fsdp_api.ReduceScatter):
    """FSDP's reduce-scatter of one group of parameters: silent but in the last micro-batch, then in tree shape."""

    def __init__(self, gradients: OrderedGradients, world_size: int):
        self._gradients = gradients
        self._world_size = world_size

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        total = self._gradients.collect(self, input_tensor)
        if total is None:
            output_tensor.zero_()
        else:
            output_tensor.copy_(ordered_reduce_scatter(total, self._world_size))
        return None
