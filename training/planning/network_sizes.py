"""Count the sizes of a network on torch's meta device: parameters, bytes saved for the backward pass, bytes moved."""

import functools
import math

import attrs

from common.errors import BadInput
from model.axes import Axes, axes_of, plain_name, shard_cut
from model.config import ModelConfig
from model.counts import meta_network, with_few_blocks
from model.shards import ShardedGPT, ShardExchange
from training.optimizers.update_rule import rules_of, state_bytes
from training.planning.kernel_count import count_kernels


@attrs.frozen(kw_only=True)
class NetworkSizes:
    """Sizes on one rank, separately for one block ("block") and for everything outside the blocks ("outer")."""

    outer: dict[str, Axes]  # parameters outside the blocks
    block: dict[str, Axes]  # parameters of one block
    outer_copies: int  # bytes of the bf16 weights saved for the backward pass; the micro-batch size does not matter
    block_copies: int
    outer_bytes: int  # bytes of activations that are saved for the backward pass, per sequence
    block_bytes: int
    # Bytes per token that a block's kernels, except matrix products and attention, would move if they were all fused
    fused_bytes: float
    separate_bytes: float  # the same number if every operator were a separate kernel
    attention_width: int  # heads times head width; the sum of these products if a block has several attention layers

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
    """Return the sizes of a network, counted with one block and one sequence.

    Raises BadInput if the network cannot be counted this way: the shape of a parameter does not match its axes, the
    network does not run on the meta device, or its attention is not causal.
    """
    few, parameters, local = with_few_blocks(config), dict[str, Axes](), shards // ranks
    exchange = ShardExchange(shards=shards, local_shards=range(local))
    network = meta_network(few) if shards == 1 else ShardedGPT(few, exchange)
    for name, value in network.named_parameters():
        axes, shape = axes_of(name, config), tuple(value.shape)
        if shape != (expected_shape := shard_cut(axes, shards, 0).shape):
            raise BadInput(
                f"model.json: {name}: got shape {shape}, wanted {expected_shape}, according to its axes in "
                "model/axes.py"
            )
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
