"""AdamW (Loshchilov and Hutter 2019) with decay on matrices only, fused on GPUs."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from training.config import TrainConfig


def make_optimizer(parameters: dict[str, nn.Parameter], config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """Return AdamW over the parameters. Biases and LayerNorm gains, which have one dimension, do not decay."""
    decayed = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
    others = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    # On a CPU one tensor after the other stays in the cache: the bits of foreach in about half of its time. FSDP's
    # shards are dispatched in Python, which costs more than that.
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
    kernel = {"fused": True} if device.type == "cuda" else {"foreach": sharded}
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), **kernel)
