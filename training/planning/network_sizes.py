"""Sizes of a network: parameters, bytes saved for the backward pass, bytes moved, counted on torch's meta device."""

import functools
import math

import attrs

from common.errors import BadInput
from model.axes import Axes, axes_of, plain_name, shard_cut
from model.config import ModelConfig
from model.counts import with_few_blocks, meta_network
from model.shards import ShardedGPT, ShardExchange
from training.optimizers.update_rule import rules_of, state_bytes
from training.planning.kernel_count import count_kernels


@attrs.frozen(kw_only=True)
class NetworkSizes:
    """Sizes on a rank that add up over layers: of one block, and of all outside the blocks."""

    outer: dict[str, Axes]  # parameters
    block: dict[str, Axes]
    outer_copies: int  # saved for the backward pass, bytes whatever the micro-batch: weights in bf16
    block_copies: int
    outer_bytes: int  # saved for the backward pass, per sequence
    block_bytes: int
    fused_bytes: float  # that a block's kernels move per token, products and attention aside, were all fused
    separate_bytes: float  # the same with a kernel for each operator
    attention_width: int  # H D of a block's attention, or their sum where it has several

    @functools.cached_property
    def outer_parameters(self) -> int:
        return sum(math.prod(axes.shape) for axes in self.outer.values())

    @functools.cached_property
    def block_parameters(self) -> int:
        return sum(math.prod(axes.shape) for axes in self.block.values())

    def parameters(self, layers: int) -> int:
        return self.outer_parameters + layers * self.block_parameters

    def state_bytes(self, optimizer: str, layers: int) -> int:
        rules = rules_of(optimizer)
        return state_bytes(rules, self.outer.values()) + layers * state_bytes(rules, self.block.values())


@functools.cache
def network_sizes(config: ModelConfig, shards: int = 1, ranks: int = 1, *, compiled: bool = True) -> NetworkSizes:
    """Return the sizes, from one block and one sequence. Raises BadInput for networks that cannot be so counted."""
    few, parameters, local = with_few_blocks(config), dict[str, Axes](), shards // ranks
    exchange = ShardExchange(shards=shards, local_shards=range(local))
    network = meta_network(few) if shards == 1 else ShardedGPT(few, exchange)
    for name, value in network.named_parameters():
        axes, shape = axes_of(name, config), tuple(value.shape)
        if shape != (wanted := shard_cut(axes, shards, 0).shape):
            raise BadInput(f"model.json: {name}: got {shape} elements, wanted {wanted}, those of its axes")
        columns = axes.columns and axes.columns._replace(size=shape[1])
        parameters[name] = attrs.evolve(axes, rows=(axes.rows[0]._replace(size=shape[0]),), columns=columns)
    kernels = count_kernels(attrs.evolve(config, n_layers=1), shards, local, compiled=compiled)
    return NetworkSizes(
        outer={name: axes for name, axes in parameters.items() if not plain_name(name).startswith("blocks.")},
        block={name: axes for name, axes in parameters.items() if plain_name(name).startswith("blocks.0.")},
        outer_copies=kernels.saved["outer", "fixed"],
        block_copies=kernels.saved["block", "fixed"],
        outer_bytes=kernels.saved["outer", "sequences"],
        block_bytes=kernels.saved["block", "sequences"],
        fused_bytes=kernels.moved["fused"] / config.context_length,
        separate_bytes=kernels.moved["separate"] / config.context_length,
        attention_width=kernels.attention_width,
    )
