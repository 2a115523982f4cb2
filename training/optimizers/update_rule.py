"""Update rules: the torch optimizers that make up an optimizer of train.json, and their state for each parameter."""

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

RATE_FACTOR = "rate_factor"  # key of a parameter group: the group's learning rate divided by the schedule's rate


@attrs.frozen(kw_only=True)
class Placement:
    """The placement of a rule's parameters: their device, their axes, and their spread over ranks."""

    device: torch.device
    axes: Mapping[str, Axes]  # name of a parameter on this rank -> axes of the complete parameter
    make_spread: Callable[[], Spread]  # may make a process group, so it must be called once on every rank or not at all

    @functools.cached_property
    def spread(self) -> Spread:
        """How parameters are spread over the ranks that share the work of an update.

        Only rules that divide their work among ranks use this.
        """
        return self.make_spread()


@attrs.frozen(kw_only=True)
class UpdateRule:
    """One torch optimizer, and the parameters that it updates.

    `build` also creates the 0-dimensional tensor `step` of each parameter, in which torch's optimizer counts updates.
    An optimizer with `defaults["fused"]` blocks updates on the device (`found_inf`). With any other optimizer, the host
    waits for the GPU before each update.
    """

    takes: Callable[[Axes], bool] = lambda axes: True
    # The tensors of a parameter's state, such as moments. They have the shape of the parameter. The keys are torch's
    # names; checkpoints and memory predictions use them.
    state: Mapping[str, torch.dtype]
    build: Callable[[dict[str, nn.Parameter], OptimizationOptions, Placement], torch.optim.Optimizer]
    # Returns the values that parameter groups have at a step, in addition to the learning rate. The first step is 0.
    settings: Callable[[OptimizationOptions, int], dict[str, float]] = lambda options, step: {}


def rules_of(optimizer: str) -> tuple[UpdateRule, ...]:
    """Return the rules of an optimizer of train.json. Each parameter is taken by exactly one rule."""
    rules: tuple[UpdateRule, ...] = importlib.import_module(f"training.optimizers.{optimizer}").RULES
    return rules


def state_bytes(rules: Iterable[UpdateRule], parameters: Iterable[Axes]) -> int:
    """Return the bytes of all state tensors for parameters with these axes."""
    states = [(math.prod(axes.shape), rule.state) for axes in parameters for rule in rules if rule.takes(axes)]
    return sum(elements * dtype.itemsize for elements, state in states for dtype in state.values())


def rate_group(axes: Axes) -> str:
    if axes.columns is None:
        return "vector"
    if axes.embedding:
        return "embedding"
    return "head" if axes.row_names == ["vocab"] else "matrix"


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], options: OptimizationOptions, axes: Mapping[str, Axes]
) -> list[dict[str, Any]]:
    """Return torch's parameter groups.

    All parameters of a group have the same weight decay, which is zero except for matrices. They also have the same
    learning rate, stored as a multiple of the schedule's rate.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        rate = options.group_learning_rates.get(rate_group(axes[name]), options.learning_rate)
        key = axes[name].columns is not None, rate / options.learning_rate
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": group, "weight_decay": options.weight_decay if decays else 0.0, RATE_FACTOR: factor}
        for (decays, factor), group in groups.items()
    ]
