"""Data parallelism of one network: DDP, FSDP2, or none on a single rank; torch.compile; gradient synchronization.

Names of parameters are those of the bare network under any wrapper.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT
from model.loss import NextTokenLoss
from training.parallel.mesh import RankGroup, data_parallel_of
from training.parallel.ordered_reduce import OrderedGradients, odd_factor
from training.precision import Numerics


class Parallel:
    """A network wrapped for training on all ranks."""

    def __init__(
        self, network: GPT, model: Any, data_parallel: RankGroup, ordered: OrderedGradients | None, divisor: int
    ):
        self.network = network  # bare: plain names
        self.model = model  # wrapped: what to call
        self.data_parallel = data_parallel
        # Divides the reduced gradient of unscaled losses into that of the global mean; native reductions average.
        self.gradient_divisor = divisor
        self._ordered = ordered
        # Read once: between a forward and its backward FSDP shows gathered weights under the same names.
        self._parameters = dict(network.named_parameters())

    @contextmanager
    def gradient_sync(self, *, enabled: bool) -> Iterator[None]:
        """Context of one forward and backward pass: reduce gradients over ranks only when enabled.

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
        """Clear gradients for the next step. DDP's are views of its buckets: freeing them would cost a copy a step."""
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=not isinstance(self.model, DistributedDataParallel))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer updates; under FSDP each is this rank's shard."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Return the gradients after a synchronized backward pass, in the order of the parameters."""
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]


def parallelize(
    model: NextTokenLoss | GPT, kind: str, numerics: Numerics, accumulation: int, mesh: DeviceMesh
) -> Parallel:
    """Compile and wrap a model that lies on this rank's device, as `kind`: "ddp" or "fsdp". Call it on every rank."""
    network = model.network if isinstance(model, NextTokenLoss) else model
    data_parallel = data_parallel_of(mesh)
    divisor, ordered = accumulation, None
    if numerics.determinism != "off":
        divisor = accumulation * data_parallel.size
        run = odd_factor(divisor) if numerics.determinism == "elastic" else accumulation
        ordered = OrderedGradients(list(network.parameters()), run, data_parallel)
    compile_model(model, numerics.compiled)
    wrapped: Any = model
    # On one rank FSDP skips its reduce-scatter, and with it the ordered sum: the bare model does the same.
    if kind == "fsdp" and (data_parallel.size > 1 or ordered is None):
        wrapped = wrap_in_fsdp(model, network, mesh, ordered)
    elif data_parallel.size > 1:
        wrapped = wrap_in_ddp(model, mesh, ordered)
    return Parallel(network, wrapped, data_parallel, ordered, divisor)


def compile_model(model: NextTokenLoss | GPT, how: bool | str) -> None:
    """Compile a model in place: blocks, head and loss (True), as one graph ("model"), or not at all (False)."""
    if not how:
        return
    assert isinstance(model, NextTokenLoss)
    # Blocks are graphs of their own, so DDP's hooks run between them: splitting graphs at buckets gains nothing.
    torch._dynamo.config.optimize_ddp = False
    if how == "model":
        model.compile(fullgraph=True, dynamic=False)  # gradients arrive all at once: no overlap with their reduction
        return
    for block in model.network.blocks:
        block.compile(fullgraph=True, dynamic=False)
    model.compile_head(fullgraph=True, dynamic=False)


def wrap_in_ddp(model: nn.Module, mesh: DeviceMesh, ordered: OrderedGradients | None) -> DistributedDataParallel:
    """Return a model whose replicas on all ranks of the mesh share gradients."""
    device = next(model.parameters()).device
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
    )
    if ordered is not None:
        wrapped.register_comm_hook(None, ordered.ddp_hook)
    return wrapped


def wrap_in_fsdp(model: nn.Module, network: GPT, mesh: DeviceMesh, ordered: OrderedGradients | None) -> FSDPModule:
    """Return a model whose parameters are sharded over the mesh: each block a group, everything else another."""
    groups: list[FSDPModule] = [fully_shard(module, mesh=mesh) for module in (*network.blocks, model)]
    if ordered is not None:
        for group in groups:
            group.set_custom_reduce_scatter(ordered.reduce_scatter())
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
    return groups[-1]
