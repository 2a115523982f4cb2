"""Memory of FSDP's collectives from the compute stream's pool.

Torch's allocator never gives a stream's memory to another stream, so a pool of its own would keep gradients, which are
there after the backward pass, apart from the activations of the time before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_api  # ReduceScatter, the interface of set_custom_reduce_scatter

from training.parallel.process_group import RankGroup, reduce_scatter_single


@contextmanager
def compute_memory(device: torch.device) -> Iterator[None]:
    """Context in which new tensors have memory of the compute stream. The current stream waits for earlier users.

    Before such a tensor is dropped, the compute stream has to wait for its last use.
    """
    if device.type != "cuda":
        yield
        return
    current, compute = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    with torch.cuda.stream(compute):
        yield
    current.wait_stream(compute)


class ComputeMemory:
    """Allocator of FSDP's collectives. Gradients are in its memory, too: FSDP has the compute stream wait."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with compute_memory(device):
            return torch.empty(size, dtype=dtype, device=device)


class ReduceScatter(ComputeMemory, _fsdp_api.ReduceScatter):
    """FSDP's own reduce-scatter; on two levels followed by an all-reduce across nodes."""

    def __init__(self, across: RankGroup):
        self._across = across

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        assert not async_op  # the all-reduce follows at once
        reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)
        if self._across.size > 1:
            dist.all_reduce(output_tensor, op=op, group=self._across.group)
        return None
