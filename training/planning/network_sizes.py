"""Sizes of a network: parameters, bytes saved for the backward pass, bytes moved, counted on torch's meta device."""

import functools
import math

import attrs

from common.errors import BadInput
from model.axes import Axes, axes_of
from model.config import ModelConfig
from model.counts import like_blocks, meta_network
from training.optimizers.update_rule import rules_of, state_bytes
from training.planning.kernel_count import count_kernels


@attrs.frozen(kw_only=True)
class NetworkSizes:
    """Sizes that add up over layers: of one block, and of all outside the blocks."""

    outer: dict[str, Axes]  # parameters
    block: dict[str, Axes]
    outer_copies: int  # saved for the backward pass, bytes whatever the micro-batch: weights in bf16
    block_copies: int
    outer_bytes: int  # saved for the backward pass, per sequence
    block_bytes: int
    fused_bytes: float  # that a block's kernels move per token, products and attention aside, were all fused
    separate_bytes: float  # the same with a kernel for each operator
    attention_width: int  # H D of a block's attention, or their sum where it has several

    @property
    def outer_parameters(self) -> int:
        return sum(math.prod(axes.shape) for axes in self.outer.values())

    @property
    def block_parameters(self) -> int:
        return sum(math.prod(axes.shape) for axes in self.block.values())

    def parameters(self, layers: int) -> int:
        return self.outer_parameters + layers * self.block_parameters

    def state_bytes(self, optimizer: str, layers: int) -> int:
        rules = rules_of(optimizer)
        return state_bytes(rules, self.outer.values()) + layers * state_bytes(rules, self.block.values())


@functools.cache
def network_sizes(config: ModelConfig, *, compiled: bool = True) -> NetworkSizes:
    """Return the sizes, from one block and one sequence. Raises BadInput for networks that cannot be so counted."""
    shapes = {name: tuple(value.shape) for name, value in meta_network(like_blocks(config)).named_parameters()}
    parameters = {name: axes_of(name, config) for name in shapes}
    for name, axes in parameters.items():
        if axes.shape != shapes[name]:
            raise BadInput(f"model.json: {name}: got {shapes[name]} elements, wanted {axes.shape}, those of its axes")
    network = meta_network(attrs.evolve(config, n_layers=1))
    kernels = count_kernels(network, compiled=compiled)
    return NetworkSizes(
        outer={name: axes for name, axes in parameters.items() if not name.startswith("blocks.")},
        block={name: axes for name, axes in parameters.items() if name.startswith("blocks.0.")},
        outer_copies=kernels.saved["outer", "fixed"],
        block_copies=kernels.saved["block", "fixed"],
        outer_bytes=kernels.saved["outer", "sequences"],
        block_bytes=kernels.saved["block", "sequences"],
        fused_bytes=kernels.moved["fused"] / config.context_length,
        separate_bytes=kernels.moved["separate"] / config.context_length,
        attention_width=kernels.attention_width,
    )
