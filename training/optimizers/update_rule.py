"""Declaration of an optimizer: its state per parameter, and how torch builds it. `optimizer_registry.py` lists all."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

Shape = tuple[int, ...]


@attrs.frozen(kw_only=True)
class HyperParameters:
    """Hyperparameters from train.json."""

    learning_rate: float  # peak; the schedule sets that of each step
    weight_decay: float
    betas: tuple[float, float]


@attrs.frozen
class StateTensor:
    """One tensor of state for one parameter, such as a moment: kept in checkpoints, counted by memory predictions."""

    shape: Shape  # whole, on all ranks together; at least one dimension
    dtype: torch.dtype = torch.float32

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@attrs.frozen(kw_only=True)
class UpdateRule:
    """One torch optimizer, and the parameters it updates.

    `build` creates the 0-dimensional tensor `step` of each parameter, where torch's optimizer counts its updates; other
    0-dimensional state cannot be declared. An optimizer with `defaults["fused"]` blocks updates on the device
    (`found_inf`); with any other one the host waits for the GPU before each update.
    """

    takes: Callable[[str, Shape], bool] = lambda name, shape: True  # by a parameter's name and shape
    state: Callable[[Shape], dict[str, StateTensor]]  # state of one parameter, by torch's names
    build: Callable[[dict[str, nn.Parameter], HyperParameters, torch.device], torch.optim.Optimizer]


@attrs.frozen(kw_only=True)
class OptimizerKind:
    """An optimizer that train.json can name. Its rules share the parameters: exactly one takes each."""

    title: str  # in logs and model cards
    rules: tuple[UpdateRule, ...]
    # FSDP gives each rank some rows of every parameter. State of another shape than its parameter needs it whole, too.
    needs_whole_parameters: bool = False

    def state_bytes(self, parameters: Mapping[str, Shape]) -> int:
        """Return the bytes of all state tensors for parameters of these names and shapes."""
        return sum(
            tensor.size_bytes
            for name, shape in parameters.items()
            for rule in self.rules
            if rule.takes(name, shape)
            for tensor in rule.state(shape).values()
        )


def decay_groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups of torch: matrices with weight decay, biases and LayerNorm gains without."""
    matrices = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
