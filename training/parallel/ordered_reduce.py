"""Ordered reduction of gradients: sums with the same bits on any number of ranks and under any wrapper.

The N micro-batches of a step are the leaves of one fixed tree: runs of `odd` leaves are added in order, where
N = odd x 2^k, and the 2^k results pairwise, neighbors first. A rank owns a contiguous share of the leaves and holds a
partial sum of each of its largest complete subtrees: one where the ranks divide 2^k, else a few (sum_tree.py). Ranks
exchange partial sums as they are and add them in the same tree (exchange.py). IEEE addition commutes, so only the
tree's shape matters.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.parallel.exchange import Exchange, ordered_all_reduce, ordered_reduce_scatter
from training.parallel.sum_tree import SumTree, leaf


class LeafSum:
    """Partial sums of a rank's leaves. A leaf is a list of tensors that belongs to the sum: nothing is copied."""

    def __init__(self, tree: SumTree, leaves: range):
        self._tree = tree
        self._leaves = leaves
        self._added: list[range] = []
        self._sums: list[list[Tensor]] = []  # of the ranges above

    def add(self, gradients: list[Tensor]) -> None:
        """Add the next leaf but the last one, in place."""
        for _ in range(self._joined()):
            torch._foreach_add_(gradients, self._sums.pop())
        self._sums.append(gradients)

    def take(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return the partial sums that stay apart, and those to be added to the last leaf, in this order; reset."""
        joined, sums = self._joined(), self._sums
        assert self._added[-1].stop == self._leaves.stop and len(self._added) + joined == len(sums) + 1
        apart, self._added, self._sums = len(sums) - joined, [], []
        return sums[:apart], sums[apart:][::-1]

    def _joined(self) -> int:
        """Count the next leaf; return how many partial sums it is added to."""
        following = self._added[-1].stop if self._added else self._leaves.start
        return self._tree.push(self._added, leaf(following))


class OrderedGradients:
    """Gradient sums of a step: collects the gradients of every micro-batch, reduces over ranks in the last one only.

    Under DDP and on one rank, the gradients of all but the last micro-batch are taken out of `parameter.grad`, which is
    None afterwards. The last micro-batch's are completed in place: in DDP's buckets by its communication hook
    (`ddp_hook`), on one rank at the end of `microbatch`. Under FSDP all pass its reduce-scatter (`reduce_scatter`).
    """

    def __init__(self, parameters: list[nn.Parameter], tree: SumTree, own: range, levels: tuple[Exchange, ...]):
        """`own`: this rank's leaves."""
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._new_sum = partial(LeafSum, tree, own)
        self._levels = levels
        self._alone = len(own) == tree.leaves
        self._sum = self._new_sum()
        self._apart: list[list[Tensor]] = []  # partial sums that the last micro-batch's gradients do not belong to
        self._earlier: list[list[Tensor]] = []  # to be added to the gradients of the last micro-batch
        self._sharded = False  # under FSDP
        self._received: Tensor | None = None  # by the latest reduce-scatter of FSDP, which may be under way
        self._last, self._idle = False, False
        device = parameters[0].device
        # Prior to the kernels of the backward pass, which are long and many.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def microbatch(self, parameters: Collection[nn.Parameter], *, last: bool, idle: bool) -> Iterator[None]:
        """Context of one forward and backward pass, reduced if `last`; an `idle` one's gradients are dropped."""
        self._last, self._idle = last, idle
        whole = not self._sharded
        if last and whole:
            self._apart, self._earlier = self._sum.take()
        yield
        if whole and not idle and (not last or self._alone):
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            assert len(gradients) == len(self._places) == len(parameters)
            for earlier in self._earlier:
                torch._foreach_add_(gradients, earlier)
            if not last:
                self._sum.add(gradients)
        self._apart, self._earlier, self._received = [], [], None
        if not last:
            for parameter in parameters:
                parameter.grad = None

    def ddp_hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket in place of DDP's all-reduce; on a GPU beside the backward pass, on a stream of its own."""
        if self._stream is None:
            self._reduce(bucket)
            return finished(bucket.buffer())
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._reduce(bucket)
            return finished(bucket.buffer())  # DDP waits for this stream before backward() returns

    def _reduce(self, bucket: dist.GradBucket) -> None:
        places = [self._places[id(parameter)] for parameter in bucket.parameters()]
        for earlier in self._earlier:
            torch._foreach_add_(bucket.gradients(), [earlier[place] for place in places])
        apart = [[part[place] for place in places] for part in self._apart]
        ordered_all_reduce(bucket.buffer(), apart, self._levels)

    def shard_reduction(self) -> Callable[[Tensor, Tensor], None]:
        """Return the reduction of one FSDP group: called with this rank's part of the result, and whole gradients."""
        self._sharded = True
        return partial(self._reduce_shards, self._new_sum())

    def _reduce_shards(self, total: LeafSum, output: Tensor, gradients: Tensor) -> None:
        """Add a leaf. Only the last micro-batch has an output; FSDP drops the gradient that it makes of any other."""
        if self._idle:
            return
        if not self._last:
            total.add([gradients.clone()])
            return
        apart, joined = total.take()
        for [earlier] in joined:
            gradients += earlier
        self._received = None  # FSDP has made the compute stream wait for the reduce-scatter before
        with compute_memory(gradients.device):
            elements = self._levels[0].received_elements(len(gradients))
            self._received = torch.empty(elements, dtype=gradients.dtype, device=gradients.device)
        own = ordered_reduce_scatter([*(part for [part] in apart), gradients], self._received, self._levels)
        output.copy_(own)


def finished(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Return the result of a communication hook, for which DDP's stream waits until this one has come so far."""
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


@contextmanager
def compute_memory(device: torch.device) -> Iterator[None]:
    """Context in which new tensors have memory of the compute stream. The current stream waits for earlier users.

    Torch's allocator never gives a stream's memory to another stream, so a pool of its own would keep FSDP's gradients,
    which are there after the backward pass, apart from the activations of the time before. Before such a tensor is
    dropped, the compute stream has to wait for its last use.
    """
    if device.type != "cuda":
        yield
        return
    current, compute = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    with torch.cuda.stream(compute):
        yield
    current.wait_stream(compute)
