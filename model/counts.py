"""Count a network's parameters, and its FLOPs per token for MFU, by building the network on torch's meta device."""

import functools

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from common.errors import BadInput
from model.axes import unpadded
from model.config import ModelConfig
from model.gpt import GPT

FEW_LAYERS = 4  # if all blocks are alike, only this many blocks are built, and the counts are extrapolated
INITIALIZERS = (nn.init.normal_, nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.zeros_, nn.init.ones_)


def parameter_count(config: ModelConfig) -> int:
    """Return the number of trained parameters. Padding is not counted, and tied weights are counted once."""
    return _counts(config)[0]


def matmul_parameter_count(config: ModelConfig) -> int:
    """Return the number of weights in matrix products, including the output head.

    Raises BadInput if the network has a matrix whose FLOPs are unknown.
    """
    return _counts(config)[1]


def flops_per_token(config: ModelConfig) -> int:
    """Return the FLOPs of the forward and backward pass per token: 6 N + 12 L C T, with N matmul parameters.

    The formula is from PaLM (arXiv 2204.02311), appendix B. It does not subtract the FLOPs that causal masking or an
    attention window saves.
    """
    attention = 12 * config.n_layers * config.emb_dim * config.context_length
    return 6 * matmul_parameter_count(config) + attention


@functools.cache
def meta_network(config: ModelConfig) -> GPT:
    """Return a network on the meta device, where tensors have shapes but no memory.

    The network is cached, so the caller must not change it.
    """
    with torch.device("meta"), _Uninitialized():
        return GPT(config)


def with_few_blocks(config: ModelConfig) -> ModelConfig:
    """Return the configuration with only FEW_LAYERS blocks, so that counts can be extrapolated from a small network.

    If the blocks do not all have the same shapes, `config` is returned unchanged.
    """
    few = attrs.evolve(config, n_layers=min(config.n_layers, FEW_LAYERS))
    shapes = [[parameter.shape for parameter in block.parameters()] for block in meta_network(few).blocks]
    return few if all(block_shapes == shapes[0] for block_shapes in shapes) else config


@functools.cache
def _counts(config: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters, and the number of parameters that are used in matrix products."""
    small_config = with_few_blocks(config)
    network = meta_network(small_config)
    linear = {id(part.weight) for part in network.modules() if isinstance(part, nn.Linear)}
    linear.add(id(network.output_weight()))
    tables = {id(part.weight) for part in network.modules() if isinstance(part, nn.Embedding)}
    outer, blocks = [0, 0], [0, 0]  # in each list: all parameters, parameters in matrix products
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1 and id(parameter) not in linear | tables:
            raise BadInput(
                f"model.json: {name}: the FLOPs of this matrix are unknown, because it belongs to neither an nn.Linear "
                "nor an nn.Embedding; use one of these, or count it in model/counts.py"
            )
        counts = blocks if name.startswith("blocks.") else outer
        size = unpadded(name, parameter, config).numel()
        counts[0] += size
        counts[1] += size * (id(parameter) in linear)
    layers = small_config.n_layers
    parameters, matmul_parameters = (
        outside + inside * config.n_layers // layers for outside, inside in zip(outer, blocks, strict=True)
    )
    return parameters, matmul_parameters


class _Uninitialized(TorchFunctionMode):
    """Skip the initialization of new weights. On the meta device, it would import torch's compiler, which takes 1 s."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in INITIALIZERS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))
