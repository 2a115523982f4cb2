"""Counts of a network, by the network itself on torch's meta device: parameters, and the FLOPs of a token for MFU."""

import functools

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from common.errors import BadInput
from model.axes import unpadded
from model.config import ModelConfig
from model.gpt import GPT

FEW_LAYERS = 4  # that stand for all where their parameters are alike
FILLING = (nn.init.normal_, nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.zeros_, nn.init.ones_)


def parameter_count(config: ModelConfig) -> int:
    """Return the number of trained parameters: padding not counted, tied weights counted once."""
    return _counts(config)[0]


def matmul_parameter_count(config: ModelConfig) -> int:
    """Return the weights in matrix products, the head's included. Raises BadInput for a matrix of unknown FLOPs."""
    return _counts(config)[1]


def flops_per_token(config: ModelConfig) -> int:
    """Return FLOPs of forward and backward for one token: 6 N + 12 L C T.

    PaLM (arXiv 2204.02311), appendix B, with N the matmul parameters; neither causal masking nor a window is credited.
    """
    attention = 12 * config.n_layers * config.emb_dim * config.context_length
    return 6 * matmul_parameter_count(config) + attention


@functools.cache
def meta_network(config: ModelConfig) -> GPT:
    """Return a network on the meta device: shapes without memory. It is not to be changed."""
    with torch.device("meta"), _Unfilled():
        return GPT(config)


def like_blocks(config: ModelConfig) -> ModelConfig:
    """Return the configuration of a network of few such blocks, or the same where these are not alike."""
    few = attrs.evolve(config, n_layers=min(config.n_layers, FEW_LAYERS))
    shapes = [[value.shape for value in block.parameters()] for block in meta_network(few).blocks]
    return few if all(own == shapes[0] for own in shapes) else config


@functools.cache
def _counts(config: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters, and of those in matrix products."""
    counted = like_blocks(config)
    network = meta_network(counted)
    linear = {id(part.weight) for part in network.modules() if isinstance(part, nn.Linear)}
    linear.add(id(network.output_weight()))
    tables = {id(part.weight) for part in network.modules() if isinstance(part, nn.Embedding)}
    outer, blocks = [0, 0], [0, 0]  # parameters, and those in matrix products
    for name, value in network.named_parameters():
        if value.dim() > 1 and id(value) not in linear | tables:
            raise BadInput(
                f"model.json: {name}: got a matrix of no nn.Linear or nn.Embedding, so its FLOPs are unknown: "
                "use one of these, or count it in model/counts.py"
            )
        own, size = blocks if name.startswith("blocks.") else outer, unpadded(name, value, config).numel()
        own[0] += size
        own[1] += size * (id(value) in linear)
    layers = counted.n_layers
    every, products = (out + inside * config.n_layers // layers for out, inside in zip(outer, blocks, strict=True))
    return every, products


class _Unfilled(TorchFunctionMode):
    """Leaves new weights unfilled: to "fill" them on the meta device would import torch's compiler, for a second."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function in FILLING:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))
