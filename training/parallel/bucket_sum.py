"""DDP's reduction of gradients as plain sums: its own divides each gradient, a kernel for every parameter."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class BucketSum:
    """Communication hook of DDP: adds each bucket over all ranks in place, beside the backward pass."""

    def __init__(self, group: Any):
        self._group = group
        self.reducing = True  # False: a backward pass only moves its gradients into the buckets
        self._first = True  # DDP replaces its buckets after the first pass

    def ddp_hook(
        self,
        _: Any,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP checks this annotation
    ) -> torch.futures.Future[Tensor]:
        if not self.reducing:
            return finished(bucket.buffer())
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        assert work is not None
        if self._first:  # what nobody waits for, NCCL's watchdog holds for another step: a copy of all gradients
            work.wait()
            self._first = not bucket.is_last()
        return work.get_future().then(_first)


def finished(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Return the result of a communication hook, for which DDP's stream waits until this one has come so far."""
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


def _first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
