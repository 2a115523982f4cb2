"""Ordered reduction of gradients: sums with the same bits on any number of ranks and under any wrapper.

The N micro-batches of a step are the leaves of one fixed tree: runs of `odd` leaves are added in order, where
N = odd x 2^k, and the 2^k results pairwise, neighbors first. A rank owns a contiguous run of leaves, so for any
data-parallel size D that divides 2^k its part is a subtree. Ranks exchange partial sums as they are (all-to-all), add
them in the same tree, and share the result (all-gather). IEEE addition commutes, so only the tree's shape matters. The
bytes moved are those of a ring all-reduce: 2 (D - 1) / D of the gradient. On two levels a node's ranks do so first, for
they own a subtree where they are a power of two; then each adds its part of the sum to that of other nodes. Over the
link of each of R nodes go 2 (R - 1) / R of the gradient, the least that can.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_api  # ReduceScatter, the interface of set_custom_reduce_scatter

from training.parallel.bucket_sum import finished
from training.parallel.compute_memory import ComputeMemory, compute_memory
from training.parallel.mesh import Levels
from training.parallel.process_group import all_gather_single
from training.parallel.sum_tree import held_sums

# Elements of a bucket that are reduced at a time: a GPU's memory for them is its stream's own for good, and DDP's first
# bucket has all parameters.
PIECE = 1 << 24


class LeafSum:
    """Sum of leaves in the tree's shape. A leaf is a list of tensors that belongs to the sum: nothing is copied.

    Holds one partial sum a level instead of all leaves.
    """

    def __init__(self, run: int):
        self._run = run  # leaves added in order: `odd`
        self._leaves = 0
        # Sums of ever smaller subtrees, as the ones of a binary counter; then that of the run in progress.
        self._partial: list[list[Tensor]] = []

    def add(self, leaf: list[Tensor]) -> None:
        """Add the next leaf but the last one, in place."""
        for _ in range(self._complete_subtrees()):
            torch._foreach_add_(leaf, self._partial.pop())
        self._partial.append(leaf)

    def take(self) -> list[list[Tensor]]:
        """Return what is to be added to the last leaf, in this order, for the sum of all; reset."""
        count = self._complete_subtrees()
        assert count == len(self._partial), (self._leaves, self._run, count, len(self._partial))
        partial, self._partial, self._leaves = self._partial[::-1], [], 0
        return partial

    def _complete_subtrees(self) -> int:
        """Count the next leaf; return how many partial sums it completes."""
        self._leaves += 1
        return len(self._partial) + 1 - held_sums(self._leaves, self._run)


def pairwise_sum(parts: Tensor) -> Tensor:
    """Return the sum over the first dimension, in place, neighbors first; an odd last one joins at the next level."""
    distance = 1
    while distance < len(parts):
        parts[: len(parts) - distance : 2 * distance].add_(parts[distance :: 2 * distance])
        distance *= 2
    return parts[0]


def ordered_reduce_scatter(buffer: Tensor, received: Tensor, levels: Levels) -> Tensor:
    """Return this rank's part of the sum of all ranks' buffers, in the tree's shape, in the memory of `received`.

    `buffer` and `received` are 1-D, of a length that the size of the first level divides: the part is that of its rank.
    """
    dist.all_to_all_single(received, buffer, group=levels.inside.group)
    part = pairwise_sum(received.view(levels.inside.size, -1))
    if levels.across.size > 1:
        ordered_all_reduce(part, Levels(inside=levels.across))
    return part


def ordered_all_reduce(buffer: Tensor, levels: Levels) -> None:
    """Replace a 1-D buffer by the sum of all ranks' buffers, in the tree's shape, on every rank."""
    for piece in buffer.split(PIECE):
        padding = -len(piece) % levels.inside.size
        padded = nn.functional.pad(piece, (0, padding)) if padding else piece
        reduced = ordered_reduce_scatter(padded, torch.empty_like(padded), levels)
        all_gather_single(padded, reduced, group=levels.inside.group)
        if padding:
            piece.copy_(padded[: len(piece)])


class OrderedGradients:
    """Gradient sums of a step: collects the gradients of every micro-batch, reduces over ranks in the last one only.

    `run` is how many leaves of a rank are added in order before the pairwise tree begins: with the odd factor of all
    micro-batches the sum is elastic; with all leaves of a rank it repeats on any one data-parallel size.

    Under DDP and on one rank, the gradients of all but the last micro-batch are taken out of `parameter.grad`, which is
    None afterwards. The last micro-batch's are completed in place: in DDP's buckets by its communication hook
    (`ddp_hook`), on one rank at the end of `microbatch`. Under FSDP all pass its reduce-scatter (`reduce_scatter`).
    """

    def __init__(self, parameters: list[nn.Parameter], run: int, levels: Levels):
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._levels = levels
        self._run = run
        self._sum = LeafSum(run)
        self._earlier: list[list[Tensor]] = []  # to be added to the gradients of the last micro-batch
        self._shard_sums: dict[Any, LeafSum] = {}  # under FSDP
        self._received: Tensor | None = None  # by the latest reduce-scatter of FSDP, which may be under way
        self._last = False
        device = parameters[0].device
        # Prior to the kernels of the backward pass, which are long and many.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def microbatch(self, parameters: Collection[nn.Parameter], *, last: bool) -> Iterator[None]:
        """Context of one forward and backward pass, which DDP does not reduce unless it is the last one."""
        self._last = last
        whole = not self._shard_sums
        if last and whole:
            self._earlier = self._sum.take()
        yield
        if whole and (not last or self._levels.size == 1):
            leaf = [parameter.grad for parameter in parameters if parameter.grad is not None]
            assert len(leaf) == len(self._places) == len(parameters)
            for earlier in self._earlier:
                torch._foreach_add_(leaf, earlier)
            if not last:
                self._sum.add(leaf)
        self._earlier, self._received = [], None
        if not last:
            for parameter in parameters:
                parameter.grad = None

    def ddp_hook(
        self,
        _: Any,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP checks this annotation
    ) -> torch.futures.Future[Tensor]:
        """Reduce a bucket in place of DDP's all-reduce; on a GPU beside the backward pass, on a stream of its own."""
        if self._stream is None:
            self._reduce(bucket)
            return finished(bucket.buffer())
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._reduce(bucket)
            return finished(bucket.buffer())  # DDP waits for this stream before backward() returns

    def _reduce(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        if self._earlier:
            places = [self._places[id(parameter)] for parameter in bucket.parameters()]
            for earlier in self._earlier:
                torch._foreach_add_(bucket.gradients(), [earlier[place] for place in places])
        ordered_all_reduce(bucket.buffer(), self._levels)

    def reduce_scatter(self) -> "OrderedReduceScatter":
        """Return the replacement of one FSDP group's reduce-scatter."""
        shards = OrderedReduceScatter(self)
        self._shard_sums[shards] = LeafSum(self._run)
        return shards

    def collect(self, shards: "OrderedReduceScatter", leaf: Tensor) -> Tensor | None:
        """Add a leaf of an FSDP group; return this rank's part of the sum in the last micro-batch, else None."""
        total = self._shard_sums[shards]
        if not self._last:
            total.add([leaf.clone()])
            return None
        for [earlier] in total.take():
            leaf += earlier
        self._received = None  # FSDP has made the compute stream wait for the reduce-scatter before
        with compute_memory(leaf.device):
            self._received = torch.empty_like(leaf)
        return ordered_reduce_scatter(leaf, self._received, self._levels)


class OrderedReduceScatter(ComputeMemory, _fsdp_api.ReduceScatter):
    """Reduce-scatter of one FSDP parameter group: ordered, and in the last micro-batch only."""

    def __init__(self, gradients: OrderedGradients):
        self._gradients = gradients

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        own = self._gradients.collect(self, input_tensor)
        if own is not None:  # else the output is not defined, and the gradient that FSDP makes of it is dropped
            output_tensor.copy_(own)
        return None
