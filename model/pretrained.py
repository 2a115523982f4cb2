"""Plain state dicts: the network's own parameter names, without the vocabulary padding of embedding and head."""

import torch
from torch import Tensor

from model.axes import stored_rows
from model.config import ModelConfig
from model.gpt import GPT


def unpadded(name: str, value: Tensor, config: ModelConfig) -> Tensor:
    """Cut the padding rows off a parameter: a view, of the shape that a checkpoint stores."""
    return value[: stored_rows(name, len(value), config)]


def load_plain(model: GPT, state: dict[str, Tensor]) -> None:
    """Load a plain state dict into a model on one device.

    Raises ValueError naming the first parameter that is missing, unknown or of another shape.
    """
    parameters = dict(model.named_parameters())
    for name in sorted(parameters.keys() ^ state.keys()):
        raise ValueError(f"parameter {name} is {'missing' if name in parameters else 'unknown'}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            stored, given = unpadded(name, parameter, model.config), state[name]
            if given.shape != stored.shape:
                raise ValueError(f"parameter {name}: got shape {tuple(given.shape)}, wanted {tuple(stored.shape)}")
            parameter.zero_()  # the vocabulary padding
            stored.copy_(given)
