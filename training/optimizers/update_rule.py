"""Update rules: the torch optimizers of an optimizer of train.json, and the state of each per parameter."""

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from model.axes import Axes
from training.config.key_groups import OptimizationOptions
from training.parallel.mesh import Spread

RATE_FACTOR = "rate_factor"  # key of a parameter group: its learning rate over the schedule's


@attrs.frozen(kw_only=True)
class Placement:
    """Placement of a rule's parameters."""

    device: torch.device
    axes: Mapping[str, Axes]  # by the parameter's name on this rank, of the whole one
    make_spread: Callable[[], Spread]  # may make a process group: all ranks call it, once, or none does

    @functools.cached_property
    def spread(self) -> Spread:
        """Spread over the ranks that share out an update's work; only a rule that shares it out asks for it."""
        return self.make_spread()


@attrs.frozen(kw_only=True)
class UpdateRule:
    """One torch optimizer, and the parameters it updates.

    `build` creates the 0-dimensional tensor `step` of each parameter, where torch's optimizer counts its updates. An
    optimizer with `defaults["fused"]` blocks updates on the device (`found_inf`); with any other one the host waits for
    the GPU before each update.
    """

    takes: Callable[[Axes], bool] = lambda axes: True
    # Tensors of a parameter's state, such as moments, of its shape, by torch's names: in checkpoints and predictions.
    state: Mapping[str, torch.dtype]
    build: Callable[[dict[str, nn.Parameter], OptimizationOptions, Placement], torch.optim.Optimizer]
    # What parameter groups have at a step, counted from 0, beside the learning rate.
    settings: Callable[[OptimizationOptions, int], dict[str, float]] = lambda options, step: {}


def rules_of(optimizer: str) -> tuple[UpdateRule, ...]:
    """Return the rules of an optimizer of train.json. They share the parameters: exactly one takes each."""
    rules: tuple[UpdateRule, ...] = importlib.import_module(f"training.optimizers.{optimizer}").RULES
    return rules


def state_bytes(rules: Iterable[UpdateRule], parameters: Iterable[Axes]) -> int:
    """Return the bytes of all state tensors for parameters of these axes."""
    taken = [(math.prod(axes.shape), rule.state) for axes in parameters for rule in rules if rule.takes(axes)]
    return sum(elements * dtype.itemsize for elements, state in taken for dtype in state.values())


def rate_group(axes: Axes) -> str:
    if axes.columns is None:
        return "vector"
    if axes.embedding:
        return "embedding"
    return "head" if axes.row_names == ["vocab"] else "matrix"


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], options: OptimizationOptions, axes: Mapping[str, Axes]
) -> list[dict[str, Any]]:
    """Return torch's groups, by weight decay, of matrices alone, and learning rate, a factor of the schedule's."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        rate = options.group_learning_rates.get(rate_group(axes[name]), options.learning_rate)
        key = axes[name].columns is not None, rate / options.learning_rate
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": own, "weight_decay": options.weight_decay if decays else 0.0, RATE_FACTOR: factor}
        for (decays, factor), own in groups.items()
    ]
