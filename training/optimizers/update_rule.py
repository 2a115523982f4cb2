"""Declaration of an optimizer: its state per parameter, and how torch builds it. `optimizer_registry.py` lists all."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from model.axes import Axes
from training.parallel.process_group import RankGroup

FIRST_MOMENTUM = 0.85  # of Muon's momentum warm-up, as in KellerJordan/modded-nanogpt
RATE_FACTOR = "rate_factor"  # key of a parameter group: its learning rate over the schedule's

Shape = tuple[int, ...]


@attrs.frozen(kw_only=True)
class MuonOptions:
    """Muon's own hyperparameters."""

    split_qkv: bool  # queries, keys and values as three matrices
    momentum: float
    warmup_steps: int  # in which the momentum rises from the first one in a line
    first_momentum: float


@attrs.frozen(kw_only=True)
class HyperParameters:
    """Hyperparameters from train.json."""

    learning_rate: float  # peak; the schedule sets that of each step
    group_learning_rates: Mapping[str, float]  # peaks by `rate_group`, where they differ
    weight_decay: float
    betas: tuple[float, float]
    muon: MuonOptions

    def rate_factor(self, axes: Axes) -> float:
        """Return the learning rate of a parameter over that of the schedule, at every step."""
        return self.group_learning_rates.get(rate_group(axes), self.learning_rate) / self.learning_rate


@attrs.frozen(kw_only=True)
class Placement:
    """Placement of a rule's parameters: on every rank whole, or sharded by rows."""

    device: torch.device
    ranks: RankGroup  # that share out an update's work
    sharded: bool
    axes: Mapping[str, Axes]  # by the parameter's name


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

    takes: Callable[[Axes], bool] = lambda axes: True
    state: Callable[[Shape], dict[str, StateTensor]]  # state of one parameter, by torch's names
    build: Callable[[dict[str, nn.Parameter], HyperParameters, Placement], torch.optim.Optimizer]
    # What parameter groups have at a step, counted from 0, beside the learning rate.
    settings: Callable[[HyperParameters, int], dict[str, float]] = lambda hyper, step: {}


@attrs.frozen(kw_only=True)
class OptimizerKind:
    """An optimizer that train.json can name. Its rules share the parameters: exactly one takes each."""

    title: str  # in logs and model cards
    rules: tuple[UpdateRule, ...]
    # FSDP gives each rank some rows of every parameter. State of another shape than its parameter needs it whole, too.
    needs_whole_parameters: bool = False

    def state_bytes(self, parameters: Iterable[Axes]) -> int:
        """Return the bytes of all state tensors for parameters of these axes."""
        return sum(
            tensor.size_bytes
            for axes in parameters
            for rule in self.rules
            if rule.takes(axes)
            for tensor in rule.state(axes.shape).values()
        )


def rate_group(axes: Axes) -> str:
    """Return the group of a parameter whose learning rate train.json can set."""
    if axes.columns is None:
        return "vector"
    if axes.embedding:
        return "embedding"
    return "head" if axes.row_names == ["vocab"] else "matrix"


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], hyper: HyperParameters, axes: Mapping[str, Axes]
) -> list[dict[str, Any]]:
    """Return parameter groups of torch, one for each weight decay and learning rate: only matrices decay.

    `rate_factor` of a group is for training/optimizer.py, which sets its learning rate at each step.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        key = axes[name].columns is not None, hyper.rate_factor(axes[name])
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": own, "weight_decay": hyper.weight_decay if decays else 0.0, RATE_FACTOR: factor}
        for (decays, factor), own in groups.items()
    ]
