"""Sizes of a network without its memory: parameters, and what a forward pass saves for the backward pass.

The real forward pass runs on torch's meta device, where tensors have shapes and no memory.
"""

import functools
import math
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from model.axes import Axes, axes_of
from model.config import ModelConfig
from model.gpt import GPT
from training.optimizers.optimizer_registry import OPTIMIZERS


@attrs.frozen(kw_only=True)
class NetworkSizes:
    """Sizes that add up over layers: of one block, and of all outside the blocks."""

    outer: dict[str, Axes]  # parameters
    block: dict[str, Axes]
    outer_copies: int  # bytes, whatever the micro-batch
    block_copies: int
    outer_bytes: int  # per sequence
    block_bytes: int

    @property
    def outer_parameters(self) -> int:
        return sum(math.prod(axes.shape) for axes in self.outer.values())

    @property
    def block_parameters(self) -> int:
        return sum(math.prod(axes.shape) for axes in self.block.values())

    def parameters(self, layers: int) -> int:
        """Return the parameters of the whole network."""
        return self.outer_parameters + layers * self.block_parameters

    def state_bytes(self, optimizer: str, layers: int) -> int:
        """Return the bytes of optimizer state of the whole network."""
        kind = OPTIMIZERS[optimizer]
        return kind.state_bytes(self.outer.values()) + layers * kind.state_bytes(self.block.values())


@functools.cache
def network_sizes(config: ModelConfig) -> NetworkSizes:
    """Return the sizes, which are linear in layers and in sequences: measured at one and two of each."""
    sizes = {}
    for layers in (1, 2):
        with torch.device("meta"), _AsOnAGpu():
            network = GPT(attrs.evolve(config, n_layers=layers))
            sizes[layers] = [saved_bytes(network, microbatch_size) for microbatch_size in (1, 2)]
        parameters = {name: axes_of(name, config) for name, _ in network.named_parameters()}
    each = {layers: two - one for layers, (one, two) in sizes.items()}
    fixed = {layers: 2 * one - two for layers, (one, two) in sizes.items()}
    return NetworkSizes(
        outer={name: axes for name, axes in parameters.items() if not name.startswith("blocks.")},
        block={name: axes for name, axes in parameters.items() if name.startswith("blocks.0.")},
        outer_copies=2 * fixed[1] - fixed[2],
        block_copies=fixed[2] - fixed[1],
        outer_bytes=2 * each[1] - each[2],
        block_bytes=each[2] - each[1],
    )


def saved_bytes(network: GPT, microbatch_size: int) -> int:
    """Return the bytes that a forward pass saves for the backward pass, each memory counted once, no parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # holding them keeps their addresses from being used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    device = network.token_embedding.weight.device
    tokens = torch.zeros(microbatch_size, network.config.context_length, dtype=torch.int64, device=device)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        F.linear(network.hidden(tokens), network.output_weight())
    return sum(storage.nbytes() for storage in saved.values())


class _AsOnAGpu(TorchFunctionMode):
    """Makes operations on meta tensors save what they save on a GPU under bf16 autocast.

    The meta device knows no autocast, and would compute attention by its formula, with a T x T matrix. Flash attention
    and cuDNN's save queries, keys, values, their output and a log-sum in fp32 of each row. Weights stay unfilled: to
    "fill" them there would import torch's compiler, for a second.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (nn.init.normal_, Tensor.normal_):
            return args[0] if args else kwargs["tensor"]
        if function is F.linear:
            args = [None if value is None else value.to(torch.bfloat16) for value in args]
        elif function is F.scaled_dot_product_attention:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(*args, kwargs["dropout_p"], kwargs["is_causal"])[0]
        elif function is F.rms_norm:
            # Compiled, a norm of heads is computed again in the backward pass, and others save no more than LayerNorm.
            return args[0].detach() if args[0].dim() == 4 else F.layer_norm(*args)
        elif function is F.silu:
            return args[0]  # compiled, only its input is saved
        elif function is F.dropout and kwargs["p"] > 0:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]  # its mask takes a byte an element
        return function(*args, **kwargs)
