"""FSDP2 for a network: groups of blocks, the precision in which they are gathered, and how long they stay gathered.

One collective gathers all parameters of a group, and another collective reduces the group's gradients. A group of
blocks contains the blocks' matrices, which are gathered in the precision to which autocast would cast them. This does
not change any bit, because only matrix products read these matrices, and their gradients are rounded to that precision
anyway. All other parameters form a single group, which is gathered in fp32: the norms, the biases, and the embeddings,
which the lookup reads in fp32. Inductor sums the gradient of a bias and keeps it in fp32, although autocast would round
it.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_api  # ReduceScatter, the argument of set_custom_reduce_scatter
from torch.distributed.tensor import DTensor

from model.loss import NextTokenLoss
from training.parallel.mesh import INSIDE, Levels, levels_of
from training.parallel.ordered_reduce import OrderedGradients, compute_memory
from training.parallel.process_group import reduce_scatter_single
from training.parallel.step_clock import StepClock
from training.precision import AUTOCAST_DTYPES

# Small blocks are gathered and reduced together, in fewer and larger collectives.
GROUP_PARAMETERS = 25_000_000  # minimum size of a group, unless there would be too few groups
SMALLEST_GROUPS = 4  # minimum number of groups, so that a group can be transferred while another one computes


def wrap_in_fsdp(
    model: NextTokenLoss, mesh: DeviceMesh, ordered: OrderedGradients | None, precision: str, clock: StepClock
) -> FSDPModule:
    """Shard a model's parameters over the ranks of the first level. Reduced gradients are sums over all ranks.

    Groups that are still gathered after a backward pass have to be resharded before the update.
    """
    network = model.network
    levels, mesh = levels_of(mesh), mesh[INSIDE]
    matrices = {parameter for parameter in network.blocks.parameters() if parameter.dim() > 1}
    # Inner modules are usually wrapped first, but then the outer group could not contain the vectors of the blocks.
    outer = fully_shard(model, mesh=mesh, ignored_params=matrices)
    model.register_forward_pre_hook(lambda *_: clock.begin_waiting(), prepend=True)
    # FSDP's own hook, which gathers weights, runs between these two.
    model.register_forward_pre_hook(lambda *_: clock.end_waiting())
    outer_parameters: set[nn.Parameter] = {value for value in network.parameters() if isinstance(value, DTensor)}
    dtypes = MixedPrecisionPolicy(
        param_dtype=AUTOCAST_DTYPES.get(precision), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # In fp32 or with recomputed blocks, autocast keeps no casts, so blocks are gathered in each forward and backward
    # pass. Otherwise, blocks stay gathered for a complete step, which takes no more memory than autocast's casts would.
    once = precision != "fp32" and not model.recompute_blocks
    groups = [outer]
    for blocks in block_groups(list(network.blocks)):
        group_blocks = fully_shard(
            blocks, mesh=mesh, mp_policy=dtypes, ignored_params=outer_parameters, reshard_after_forward=not once
        )
        groups.append(group_blocks[0])
    for group in groups:
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)
        group.set_reshard_after_backward(group is not outer and not once, recurse=False)
        reduce = partial(sum_over_ranks, levels) if ordered is None else ordered.shard_reduction()
        group.set_custom_reduce_scatter(TimedReduction(reduce, clock))
    # Without this, all-gathers would use separate streams with separate memory. With it, every all-gather has to be
    # requested before its result is needed, as in the loop below.
    outer._set_unshard_async_op(True)
    for group, next_group in itertools.pairwise(groups):
        group.set_modules_to_forward_prefetch([next_group])
    return outer


class TimedReduction(_fsdp_api.ReduceScatter):
    """The timed reduction of one FSDP parameter group.

    Gradients are in memory that belongs to the compute stream, which waits for the reduction.
    """

    def __init__(self, reduce: Callable[[Tensor, Tensor], None], clock: StepClock):
        """`reduce` gets two arguments: memory for this rank's part of the result, and the complete gradients."""
        self._reduce, self._clock = reduce, clock

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with compute_memory(device):
            return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with self._clock.reducing():
            self._reduce(output_tensor, input_tensor)
        return None


def sum_over_ranks(levels: Levels, output: Tensor, gradients: Tensor) -> None:
    """Reduce as FSDP does: with a summing reduce-scatter and, if there are two levels, an all-reduce across nodes."""
    reduce_scatter_single(output, gradients, group=levels.inside.group)
    if levels.across.size > 1:
        dist.all_reduce(output, group=levels.across.group)


def group_length(block_parameters: int, blocks: int) -> int:
    """Return the number of blocks per group. The last group may have fewer."""
    return min(-(-GROUP_PARAMETERS // block_parameters), -(-blocks // SMALLEST_GROUPS))


def block_groups(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    parameters = sum(parameter.numel() for parameter in blocks[0].parameters())
    length = group_length(parameters, len(blocks))
    return [blocks[first : first + length] for first in range(0, len(blocks), length)]
