"""Data parallelism of one network: DDP, FSDP2, or none on a single rank; torch.compile; gradient synchronization.

Names of parameters are those of the bare network under any wrapper.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT
from model.loss import NextTokenLoss
from tokens.batches.sampling import rank_shares
from training.parallel.exchange import exchanges
from training.parallel.mesh import Levels, Placed, Spread, levels_of, make_mesh, wrapper_and_node_size
from training.parallel.ordered_reduce import OrderedGradients, finished
from training.parallel.process_group import RankGroup, Ranks
from training.parallel.step_clock import StepClock
from training.parallel.sum_tree import step_tree
from training.precision import Numerics

if TYPE_CHECKING:
    from training.parallel.tensor_shards import TensorShards

NEVER = (1 << 31) - 1  # steps, the most that DDP takes
BUCKET_MIB = 50  # of gradients, on GPUs: two blocks of 124M. The host starts fewer reductions than with DDP's own 25


class BucketSum:
    """Communication hook of DDP: adds each bucket in place. DDP's own divides each gradient by a kernel of its own."""

    def __init__(self, group: Any):
        self._group = group
        self.reducing = True  # False: a backward pass only moves its gradients into the buckets
        self._first = True  # DDP replaces its buckets after the first pass

    def ddp_hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if not self.reducing:
            return finished(bucket.buffer())
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        assert work is not None
        if self._first:  # what nobody waits for, NCCL's watchdog holds for another step: a copy of all gradients
            work.wait()
            self._first = not bucket.is_last()
        return work.get_future().then(lambda done: done.value()[0])


@attrs.define(kw_only=True, eq=False)
class Parallel:
    """A network wrapped for training on all ranks."""

    network: GPT  # bare: plain names
    model: Any  # wrapped: what to call
    levels: Levels
    data_parallel: RankGroup
    reduction: OrderedGradients | BucketSum | None
    clock: StepClock
    shards: "TensorShards | None" = None
    # Read once: between a forward and its backward FSDP shows gathered weights under the same names.
    _parameters: dict[str, nn.Parameter] = attrs.field(init=False)
    _sharded: list[FSDPModule] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._parameters = dict(self.network.named_parameters())
        self._sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def gradient_sync(self, *, enabled: bool, idle: bool = False) -> Iterator[None]:
        """Context of one forward and backward pass: reduce gradients over ranks only when enabled.

        An idle pass only takes part in the collectives of other ranks' passes; its loss has to be multiplied by zero.
        Both belong inside: DDP decides in the forward pass whether the backward pass will reduce.
        """
        with ExitStack() as stack:
            skipping = isinstance(self.model, DistributedDataParallel) and not enabled
            if isinstance(self.reduction, OrderedGradients):  # every micro-batch's gradient passes it
                stack.enter_context(self.reduction.microbatch(self._parameters.values(), last=enabled, idle=idle))
            elif isinstance(self.reduction, BucketSum):
                self.reduction.reducing = enabled
                skipping = skipping and bool(self.gradients())  # the first ones pass DDP, which gives them their place
            else:
                for module in self._sharded:
                    module.set_requires_gradient_sync(enabled, recurse=False)
            if skipping:
                stack.enter_context(self.model.no_sync())
            yield
        if enabled:
            for module in self._sharded:
                module.reshard()  # what is gathered once a step
            if self.shards is not None:
                self.shards.add_shared(self._parameters)

    def zero_grad(self) -> None:
        """Clear gradients. DDP copies the next ones into its buckets, which moves fewer bytes than adding to zeros."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer updates; under FSDP each is this rank's shard."""
        return self._parameters

    def make_spread(self) -> Spread:
        """Return the spread of the parameters over the ranks that share out an update's work. Collective."""
        if self.shards is not None:
            return self.shards.make_spread()
        if self._sharded:
            return Spread(ranks=self.levels.inside, row_shards=self.levels.inside.size)
        return Spread(ranks=self.data_parallel)

    def by_plain_name(self, values: Mapping[str, Tensor]) -> Mapping[str, Placed]:
        """Return tensors of the parameters' names by those of the network, which tensor shards share."""
        return values if self.shards is None else self.shards.by_plain_name(values)

    def gradients(self) -> list[Tensor]:
        """Return the gradients after a synchronized backward pass, in the order of the parameters."""
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]


def parallelize(model: NextTokenLoss, parallel: str, numerics: Numerics, microbatches: int, ranks: Ranks) -> Parallel:
    """Compile and wrap a model; `parallel` as in train.json. Call it on every rank.

    A model on the meta device gets memory without values: a rank never holds more than it keeps. `microbatches`: of a
    step, on all ranks together. Raises BadInput for "hsdp" on nodes of different sizes.
    """
    kind, node_size = wrapper_and_node_size(parallel, ranks, ordered=numerics.determinism != "off")
    mesh = make_mesh(ranks, node_size)
    levels, data_parallel, device, shards = levels_of(mesh), ranks.data_parallel, ranks.device, None
    ordered, sharded = None, kind == "fsdp" and levels.size > 1
    if type(model.network) is not GPT:  # but in tensor shards, whose module only those runs import
        from training.parallel.tensor_shards import tensor_shards

        network: Any = model.network
        shards = tensor_shards(network, ranks, levels.inside if sharded else None)
    if not sharded:
        allocate(model, device)
    if numerics.determinism != "off":
        tree = step_tree(numerics.determinism, microbatches, data_parallel.size)
        shares = rank_shares(microbatches, data_parallel.size)
        own = shares[data_parallel.rank]
        ordered = OrderedGradients(list(model.parameters()), tree, own, exchanges(tree, shares, levels))
    compile_model(model, numerics.compiled)
    wrapped: Any = model
    reduction: OrderedGradients | BucketSum | None = ordered
    clock = StepClock(device)
    if sharded:
        from training.parallel.fsdp import wrap_in_fsdp

        wrapped = wrap_in_fsdp(model, mesh, ordered, numerics.precision, clock)
        allocate(model, device)
    elif levels.size > 1:
        reduction = ordered or BucketSum(data_parallel.group)  # NCCL knows of nodes by itself
        wrapped = wrap_in_ddp(model, reduction, clock, data_parallel.group)
    return Parallel(
        network=model.network,
        model=wrapped,
        levels=levels,
        data_parallel=data_parallel,
        reduction=reduction,
        clock=clock,
        shards=shards,
    )


def allocate(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device in place; tensors on the meta device get memory there, without values."""
    model._apply(lambda value: torch.empty_like(value, device=device) if value.is_meta else value.to(device))


def compile_model(model: NextTokenLoss, how: bool | str) -> None:
    """Compile a model in place: blocks, head and loss (True), as one graph ("model"), or not at all (False)."""
    if not how:
        return
    # Blocks are graphs of their own, so DDP's hooks run between them: splitting graphs at buckets gains nothing.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = 32  # of the loss: by mode, whole or last chunk, a shard's rows with ids
    if how == "model":
        model.compile(fullgraph=True, dynamic=False)  # gradients arrive all at once: no overlap with their reduction
        return
    for block in model.network.blocks:
        block.compile(fullgraph=True, dynamic=False)
    model.compile_head(fullgraph=True, dynamic=False)


def wrap_in_ddp(
    model: nn.Module, reduction: OrderedGradients | BucketSum, clock: StepClock, group: Any
) -> DistributedDataParallel:
    """Return a model whose replicas on all ranks of a group share gradients."""
    device = next(model.parameters()).device
    wrapped = DistributedDataParallel(
        model,
        process_group=group,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=BUCKET_MIB if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    wrapped.broadcast_buffers = False  # before every forward pass: they are constants; torch renamed the argument

    def timed_hook(
        _: Any,
        bucket: dist.GradBucket,  # DDP checks this annotation
    ) -> torch.futures.Future[Tensor]:
        with clock.reducing():
            return reduction.ddp_hook(bucket)

    wrapped.register_comm_hook(None, timed_hook)
    wrapped._set_ddp_runtime_logging_sample_rate(NEVER)  # statistics of a step, for which the host waits for the GPU
    return wrapped
