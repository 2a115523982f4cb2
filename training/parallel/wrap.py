"""Data parallelism for a network (DDP, FSDP2, or none on a single rank), torch.compile, and gradient synchronization.

Under any wrapper, parameters keep the names that they have in the bare network.
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

NEVER = (1 << 31) - 1  # the largest number of steps that DDP accepts
# Size of a bucket of gradients on GPUs, about as large as two blocks of the 124M model. DDP's default is 25 MiB; with
# larger buckets, the host starts fewer reductions.
BUCKET_MIB = 50


class BucketSum:
    """A communication hook for DDP that sums each bucket in place.

    DDP's own hook would also divide each gradient, with one kernel per gradient.
    """

    def __init__(self, group: Any):
        self._group = group
        self.reducing = True  # False: a backward pass only copies its gradients into the buckets
        self._first = True  # DDP replaces its buckets after the first pass

    def ddp_hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if not self.reducing:
            return finished(bucket.buffer())
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        assert work is not None
        # If nothing waits for the work, NCCL's watchdog keeps the work's memory, a copy of all gradients, for another
        # step.
        if self._first:
            work.wait()
            self._first = not bucket.is_last()
        return work.get_future().then(lambda done: done.value()[0])


@attrs.define(kw_only=True, eq=False)
class Parallel:
    """A network wrapped for training on all ranks."""

    network: GPT  # the bare network, whose parameters have plain names
    model: Any  # the wrapped network, to be called
    levels: Levels
    data_parallel: RankGroup
    reduction: OrderedGradients | BucketSum | None
    clock: StepClock
    shards: "TensorShards | None" = None
    # Looked up only once, at the start: between a forward and a backward pass of FSDP, the same names refer to the
    # gathered weights.
    _parameters: dict[str, nn.Parameter] = attrs.field(init=False)
    _sharded: list[FSDPModule] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._parameters = dict(self.network.named_parameters())
        self._sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def gradient_sync(self, *, enabled: bool, idle: bool = False) -> Iterator[None]:
        """Surround one forward and one backward pass, as a context manager.

        If `enabled`, gradients are reduced over ranks. An `idle` micro-step only takes part in the other ranks'
        collectives, and its loss has to be multiplied by zero. The context must contain both passes, because DDP
        decides in the forward pass whether the backward pass will reduce.
        """
        with ExitStack() as stack:
            skipping = isinstance(self.model, DistributedDataParallel) and not enabled
            if isinstance(self.reduction, OrderedGradients):  # this class needs the gradients of every micro-batch
                stack.enter_context(self.reduction.microbatch(self._parameters.values(), last=enabled, idle=idle))
            elif isinstance(self.reduction, BucketSum):
                self.reduction.reducing = enabled
                # The first gradients are not skipped, so that DDP moves them into its buckets.
                skipping = skipping and bool(self.gradients())
            else:
                for module in self._sharded:
                    module.set_requires_gradient_sync(enabled, recurse=False)
            if skipping:
                stack.enter_context(self.model.no_sync())
            yield
        if enabled:
            for module in self._sharded:
                module.reshard()  # frees the parameters that are gathered once per step
            if self.shards is not None:
                self.shards.add_shared(self._parameters)

    def zero_grad(self) -> None:
        """Remove all gradients.

        DDP then copies the next gradients into its buckets, which moves fewer bytes than adding them to zeros.
        """
        for parameter in self._parameters.values():
            parameter.grad = None

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer updates. Under FSDP, these are this rank's shards."""
        return self._parameters

    def make_spread(self) -> Spread:
        """Return how the parameters are spread over the ranks that share the work of an update.

        Call it on every rank.
        """
        if self.shards is not None:
            return self.shards.make_spread()
        if self._sharded:
            return Spread(ranks=self.levels.inside, row_shards=self.levels.inside.size)
        return Spread(ranks=self.data_parallel)

    def by_plain_name(self, values: Mapping[str, Tensor]) -> Mapping[str, Placed]:
        """Rename the keys of `values` from the parameters' names on this rank to their names in the network.

        The two names differ only for tensor shards, because several shards belong to one parameter of the network.
        """
        return values if self.shards is None else self.shards.by_plain_name(values)

    def gradients(self) -> list[Tensor]:
        """Return the gradients after a synchronized backward pass, in the order of the parameters."""
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]


def parallelize(model: NextTokenLoss, parallel: str, numerics: Numerics, microbatches: int, ranks: Ranks) -> Parallel:
    """Compile and wrap a model. Call it on every rank.

    A model on the meta device gets memory without values, so that a rank never allocates more than it needs.

    Arguments:
        model: the network with its loss
        parallel: the key in train.json
        numerics: determinism, precision, and what is compiled
        microbatches: number of micro-batches per step, on all ranks together
        ranks: the ranks of the job

    Raises BadInput for "hsdp" on nodes of different sizes.
    """
    kind, node_size = wrapper_and_node_size(parallel, ranks, ordered=numerics.determinism != "off")
    mesh = make_mesh(ranks, node_size)
    levels, data_parallel, device, shards = levels_of(mesh), ranks.data_parallel, ranks.device, None
    ordered, sharded = None, kind == "fsdp" and levels.size > 1
    if type(model.network) is not GPT:  # the network is in tensor shards; only such runs import the module below
        from training.parallel.tensor_shards import tensor_shards

        network: Any = model.network
        shards = tensor_shards(network, ranks, levels.inside if sharded else None)
    if not sharded:
        allocate(model, device)
    if numerics.determinism != "off":
        tree = step_tree(numerics.determinism, microbatches, data_parallel.size)
        shares = rank_shares(microbatches, data_parallel.size)
        leaves = shares[data_parallel.rank]
        ordered = OrderedGradients(list(model.parameters()), tree, leaves, exchanges(tree, shares, levels))
    compile_model(model, numerics.compiled)
    wrapped: Any = model
    reduction: OrderedGradients | BucketSum | None = ordered
    clock = StepClock(device)
    if sharded:
        from training.parallel.fsdp import wrap_in_fsdp

        wrapped = wrap_in_fsdp(model, mesh, ordered, numerics.precision, clock)
        allocate(model, device)
    elif levels.size > 1:
        # BucketSum does not need to know the nodes, because NCCL finds the fast links itself.
        reduction = ordered or BucketSum(data_parallel.group)
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
    """Move a model to a device in place. Tensors on the meta device get memory without values."""
    model._apply(lambda value: torch.empty_like(value, device=device) if value.is_meta else value.to(device))


def compile_model(model: NextTokenLoss, how: bool | str) -> None:
    """Compile a model in place: block by block (True), as one graph ("model"), or not at all (False)."""
    if not how:
        return
    # Each block is a separate graph, so DDP's hooks run between graphs, and splitting at buckets has no advantage.
    torch._dynamo.config.optimize_ddp = False
    # The loss is compiled for each mode, and separately for full chunks and for the last chunk. In tensor shards,
    # it is also compiled for each possible number of rows that are not padding.
    torch._dynamo.config.recompile_limit = 32
    if how == "model":
        # All gradients of a single graph become available at the same time, so nothing overlaps their reduction.
        model.compile(fullgraph=True, dynamic=False)
        return
    for block in model.network.blocks:
        block.compile(fullgraph=True, dynamic=False)
    model.compile_head(fullgraph=True, dynamic=False)


def wrap_in_ddp(
    model: nn.Module, reduction: OrderedGradients | BucketSum, clock: StepClock, group: Any
) -> DistributedDataParallel:
    """Wrap a model in DDP, which reduces gradients with `reduction`. Every rank of the process group has a replica."""
    device = next(model.parameters()).device
    wrapped = DistributedDataParallel(
        model,
        process_group=group,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=BUCKET_MIB if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    # Buffers are constants, so they need not be broadcast before every forward pass. The attribute is set here because
    # newer versions of torch have renamed the argument.
    wrapped.broadcast_buffers = False

    def timed_hook(
        _: Any,
        bucket: dist.GradBucket,  # DDP checks this annotation
    ) -> torch.futures.Future[Tensor]:
        with clock.reducing():
            return reduction.ddp_hook(bucket)

    wrapped.register_comm_hook(None, timed_hook)
    # DDP's statistics would make the host wait for the GPU in some steps.
    wrapped._set_ddp_runtime_logging_sample_rate(NEVER)
    return wrapped
