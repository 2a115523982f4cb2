"""One network on many ranks: DDP, FSDP2, or bare on a single rank.

`Parallel` owns when gradients are synchronised; beside it, which rows of a tensor this rank holds. Names are always
those of the bare network.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT
from tokens.batches.sampling import Layout
from training.parallel.ordered_reduce import OrderedGradients, odd_factor
from training.parallel.process_group import Ranks


@attrs.frozen(kw_only=True)
class Wrapping:
    """How to make one network of many ranks' copies."""

    kind: str  # "ddp" or "fsdp"
    compiled: bool | str  # true: block by block; "model": as one graph
    determinism: str  # "off", "run" or "elastic"


class Parallel:
    """A network ready for training on all ranks. `network` keeps plain names, `model` is what to call."""

    def __init__(self, network: GPT, wrapping: Wrapping, layout: Layout, ranks: Ranks):
        self.network = network.to(ranks.device)
        ordered = wrapping.determinism != "off"
        microbatches = layout.accumulation * ranks.world_size
        # What turns the reduced gradient of unscaled losses into that of the global mean; native reductions average.
        self.gradient_divisor = microbatches if ordered else layout.accumulation
        self._ordered = None
        if ordered:
            run = odd_factor(microbatches) if wrapping.determinism == "elastic" else layout.accumulation
            self._ordered = OrderedGradients(network, run, ranks.world_size)
        if wrapping.compiled:
            # Blocks are graphs of their own, so DDP's hooks run between them: to split graphs at buckets gains nothing.
            torch._dynamo.config.optimize_ddp = False
        if wrapping.compiled == "model":
            network.compile(fullgraph=True, dynamic=False)  # gradients come all at once, so nothing hides their way
        elif wrapping.compiled:
            for block in network.blocks:
                block.compile(fullgraph=True, dynamic=False)
            network.head_loss.compile()
        self.model: Any = network
        # On one rank FSDP skips its reduce-scatter, and with it the ordered sum: the bare network does the same.
        if wrapping.kind == "fsdp" and (ranks.world_size > 1 or not ordered):
            # The logits are a view of the padded head's; nothing writes into them in place.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
            for block in network.blocks:
                fully_shard(block, mesh=mesh)
            self.model = fully_shard(network, mesh=mesh)
            if self._ordered is not None:
                for module in (*network.blocks, network):
                    module.set_custom_reduce_scatter(self._ordered.reduce_scatter())
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
        elif ranks.world_size > 1:
            devices = [ranks.device.index] if ranks.device.type == "cuda" else None
            self.model = DistributedDataParallel(network, device_ids=devices, gradient_as_bucket_view=True)
            if self._ordered is not None:
                self.model.register_comm_hook(None, self._ordered.ddp_hook)
        # Taken once: between a forward and its backward FSDP shows gathered weights under the same names.
        self._parameters = dict(network.named_parameters())

    @contextmanager
    def gradient_sync(self, *, enabled: bool) -> Iterator[None]:
        """Around one forward and backward: reduce gradients over ranks only when enabled.

        Both belong inside: DDP decides in the forward pass whether the backward pass will reduce.
        """
        if self._ordered is not None:  # every micro-batch's gradient passes it; it reduces in the last
            with self._ordered.microbatch(last=enabled):
                yield
            return
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(enabled)
        skipping = isinstance(self.model, DistributedDataParallel) and not enabled
        with self.model.no_sync() if skipping else nullcontext():
            yield

    def zero_grad(self, *optimizers: torch.optim.Optimizer) -> None:
        """Clear gradients for the next step. DDP's are views of its buckets: to free them would cost a copy a step."""
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=not isinstance(self.model, DistributedDataParallel))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer updates; under FSDP each is this rank's shard."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Return the gradients after a synchronised backward pass, in the order of the parameters."""
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]


def full_tensor(value: Tensor) -> Tensor:
    """Return the whole tensor of a possibly sharded one. Collective under FSDP: call it on every rank."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def local_tensor(value: Tensor) -> Tensor:
    """Return this rank's part of a possibly sharded tensor; the whole of any other."""
    return value.to_local() if isinstance(value, DTensor) else value


def held_rows(value: Tensor) -> tuple[int, Tensor]:
    """Return the rows (dim 0) of a tensor that this rank has in memory, and the first one's place in the whole."""
    if not isinstance(value, DTensor):
        return 0, value.detach()
    per_rank = -(-value.shape[0] // value.device_mesh.size())  # fully_shard cuts as torch.chunk does
    return value.device_mesh.get_local_rank() * per_rank, value.to_local().detach()


def rows_of(value: Tensor, ranks: Ranks) -> tuple[int, Tensor]:
    """Return the rows (dim 0) of a tensor that this rank answers for: FSDP's shard, or what it would be."""
    if isinstance(value, DTensor):
        return held_rows(value)
    per_rank = -(-value.shape[0] // ranks.world_size)
    first = min(ranks.rank * per_rank, value.shape[0])
    return first, value.detach()[first : first + per_rank]
