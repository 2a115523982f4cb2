"""Ordered reduction of gradients: sums with the same bits on any number of ranks and under any wrapper.

The N micro-batches of a step are the leaves of a fixed tree, where N = odd x 2^k. Each sequence of `odd` leaves is
added in order, and the 2^k results are added pairwise, neighbors first. A rank owns a contiguous share of the leaves
and has a partial sum for each of its largest complete subtrees: a single partial sum if the number of ranks divides
2^k, otherwise a few (sum_tree.py). Ranks exchange partial sums without changing them and add them in the same tree
(exchange.py). IEEE addition is commutative, so only the shape of the tree matters.
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
    """The partial sums of a rank's leaves.

    A leaf is a list of tensors. The sum changes these tensors in place, so that nothing has to be copied.
    """

    def __init__(self, tree: SumTree, leaves: range):
        self._tree = tree
        self._leaves = leaves
        self._added: list[range] = []  # ranges of the leaves that have been added
        self._sums: list[list[Tensor]] = []  # the partial sum of each of these ranges

    def add(self, gradients: list[Tensor]) -> None:
        """Add the next leaf in place. Do not call this for the last leaf: the caller of `take` adds that leaf."""
        for _ in range(self._joined()):
            torch._foreach_add_(gradients, self._sums.pop())
        self._sums.append(gradients)

    def take(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return the partial sums that stay separate, and the partial sums to be added to the last leaf, in order.

        Afterwards, this object has no sums, and the next leaf is the first leaf of a new step.
        """
        joined, sums = self._joined(), self._sums
        assert self._added[-1].stop == self._leaves.stop and len(self._added) + joined == len(sums) + 1
        separate, self._added, self._sums = len(sums) - joined, [], []
        return sums[:separate], sums[separate:][::-1]

    def _joined(self) -> int:
        """Count the next leaf, and return the number of partial sums that are added to it."""
        next_leaf = self._added[-1].stop if self._added else self._leaves.start
        return self._tree.push(self._added, leaf(next_leaf))


class OrderedGradients:
    """The gradient sums of a step. Adds up the gradients of all micro-batches; reduces over ranks in the last one.

    Under DDP and on a single rank, the gradients of every micro-batch except the last are taken from `parameter.grad`,
    which is then set to None. The sums are completed in place, in the last micro-batch's gradients. Under DDP, the
    communication hook (`ddp_hook`) completes them in DDP's buckets; on a single rank, the end of `microbatch` completes
    them. Under FSDP, all gradients pass through FSDP's reduce-scatter (`shard_reduction`).
    """

    def __init__(self, parameters: list[nn.Parameter], tree: SumTree, leaves: range, levels: tuple[Exchange, ...]):
        """`leaves` are this rank's leaves."""
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._new_sum = partial(LeafSum, tree, leaves)
        self._levels = levels
        self._alone = len(leaves) == tree.leaves
        self._sum = self._new_sum()
        self._separate: list[list[Tensor]] = []  # partial sums that do not include the last micro-batch's gradients
        self._earlier: list[list[Tensor]] = []  # partial sums to be added to the last micro-batch's gradients
        self._sharded = False  # under FSDP
        self._received: Tensor | None = None  # memory of FSDP's latest reduce-scatter, which may still be running
        self._last, self._idle = False, False
        device = parameters[0].device
        # The priority is higher than the backward pass's, because the backward pass has many long kernels.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def microbatch(self, parameters: Collection[nn.Parameter], *, last: bool, idle: bool) -> Iterator[None]:
        """Collect the gradients of one forward and backward pass, as a context manager.

        In the `last` micro-batch of a step, gradients are reduced. The gradients of an `idle` pass are dropped.
        """
        self._last, self._idle = last, idle
        replicated = not self._sharded
        if last and replicated:
            self._separate, self._earlier = self._sum.take()
        yield
        if replicated and not idle and (not last or self._alone):
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            assert len(gradients) == len(self._places) == len(parameters)
            for earlier in self._earlier:
                torch._foreach_add_(gradients, earlier)
            if not last:
                self._sum.add(gradients)
        self._separate, self._earlier, self._received = [], [], None
        if not last:
            for parameter in parameters:
                parameter.grad = None

    def ddp_hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket. This replaces DDP's all-reduce.

        On a GPU, this runs on a separate stream and overlaps the backward pass.
        """
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
        separate = [[part[place] for place in places] for part in self._separate]
        ordered_all_reduce(bucket.buffer(), separate, self._levels)

    def shard_reduction(self) -> Callable[[Tensor, Tensor], None]:
        """Return a function that reduces the gradients of one FSDP group.

        FSDP calls it with memory for this rank's part of the result, and with the complete gradients.
        """
        self._sharded = True
        return partial(self._reduce_shards, self._new_sum())

    def _reduce_shards(self, total: LeafSum, output: Tensor, gradients: Tensor) -> None:
        """Add a leaf. Only the last micro-batch sets the output; FSDP drops the gradients of all earlier ones."""
        if self._idle:
            return
        if not self._last:
            total.add([gradients.clone()])
            return
        separate, joined = total.take()
        for [earlier] in joined:
            gradients += earlier
        self._received = None  # safe: FSDP has made the compute stream wait for the previous reduce-scatter
        with compute_memory(gradients.device):
            elements = self._levels[0].received_elements(len(gradients))
            self._received = torch.empty(elements, dtype=gradients.dtype, device=gradients.device)
        parts = [*(part for [part] in separate), gradients]
        output.copy_(ordered_reduce_scatter(parts, self._received, self._levels))


def finished(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Return `buffer` as a communication hook's result. DDP's stream waits for the current stream up to this point."""
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


@contextmanager
def compute_memory(device: torch.device) -> Iterator[None]:
    """Allocate new tensors from the memory of the compute stream, as a context manager.

    The current stream waits for earlier users of that memory. Torch's allocator never gives a stream's memory to
    another stream. Without this function, FSDP's gradients, which remain after the backward pass, could not reuse the
    memory of the activations, which exist before the backward pass. Before a tensor with such memory is freed, the
    compute stream has to wait for the tensor's last use.
    """
    if device.type != "cuda":
        yield
        return
    current, compute = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    with torch.cuda.stream(compute):
        yield
    current.wait_stream(compute)
