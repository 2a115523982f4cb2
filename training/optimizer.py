"""The optimizer of a run: it updates all parameters, and owns the optimizer state that checkpoints store."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from common.errors import BadInput
from model.axes import Axes, plain_name
from training.config.key_groups import OptimizationOptions
from training.optimizers.update_rule import RATE_FACTOR, Placement, UpdateRule, rules_of, state_bytes
from training.parallel.mesh import ON_ONE_RANK, Spread, local_parameter, local_tensor


class Optimizer:
    """Updates all parameters of a network. An optimizer has one or more rules, and each rule updates some parameters.

    `state_tensors` contains the tensors that checkpoints store, by kind of state and then by the name of the parameter.
    Kinds have torch's names, such as "exp_avg". The tensors are sharded like the parameters; torch's optimizers see
    only this rank's part of the parameters and of their state.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        axes: Mapping[str, Axes],
        options: OptimizationOptions,
        device: torch.device,
        make_spread: Callable[[], Spread] = lambda: ON_ONE_RANK,
    ):
        self.state_tensors: dict[str, dict[str, Tensor]] = {}
        self.parts: tuple[torch.optim.Optimizer, ...] = ()
        rules = rules_of(options.optimizer)
        # Total over all ranks
        self.state_bytes = state_bytes(rules, {plain_name(name): of_name for name, of_name in axes.items()}.values())
        rules_by_name = {name: [rule for rule in rules if rule.takes(axes[name])] for name in parameters}
        for name, matching_rules in rules_by_name.items():
            if len(matching_rules) != 1:
                raise BadInput(
                    f"optimizer {options.optimizer}: {len(matching_rules)} of its rules take {name}, wanted exactly one"
                )
        local = {name: local_parameter(parameter) for name, parameter in parameters.items()}
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in local.items()}
        self._shards = [(full, local[name]) for name, full in parameters.items() if local[name] is not full]
        placement = Placement(device=device, axes=axes, make_spread=make_spread)
        self._options = options
        self._rules: tuple[UpdateRule, ...] = ()  # the rule of each part
        for rule in rules:
            rule_parameters = {name: local[name] for name, [match] in rules_by_name.items() if match is rule}
            if rule_parameters:
                part = rule.build(rule_parameters, options, placement)
                self.parts += (part,)
                self._rules += (rule,)
                for name, parameter in rule_parameters.items():
                    # torch would create the state at the first update, but a checkpoint is loaded or saved before that.
                    for kind, dtype in rule.state.items():
                        state = torch.zeros_like(parameters[name], dtype=dtype)  # sharded like the parameter
                        part.state[parameter][kind] = local_tensor(state)
                        self.state_tensors.setdefault(kind, {})[name] = state
        self._checked: dict[torch.optim.Optimizer, int] = {}  # number of checked entries in each part's state
        self._fused = all(part.defaults.get("fused") for part in self.parts)
        self._steps = torch.zeros((), dtype=torch.float64, device=device)

    def set_step(self, step: int, learning_rate: float) -> None:
        """Set the hyperparameters of a step, counted from 0.

        The learning rate of a parameter group is the group's factor times the schedule's learning rate.
        """
        for part, rule in zip(self.parts, self._rules, strict=True):
            settings = rule.settings(self._options, step)
            for group in part.param_groups:
                group.update(settings, lr=learning_rate * group.get(RATE_FACTOR, 1.0))

    def step(self, update_blocked: Tensor) -> None:
        """Apply the gradients. If the scalar `update_blocked` is 1.0, no parameter, state or step count changes."""
        if self._fused:
            for part in self.parts:
                part.found_inf = update_blocked  # type: ignore[attr-defined]  # read by the fused kernels
            self._update()
            self._steps += 1 - update_blocked
        # Kernels that are not fused cannot read `update_blocked`, so the host waits for the GPU here and reads it. On a
        # CPU, this costs nothing.
        elif not update_blocked.item():
            self._update()
            self._steps += 1

    def _update(self) -> None:
        for sharded, local in self._shards:
            local.grad = None if sharded.grad is None else local_tensor(sharded.grad)
        for part, rule in zip(self.parts, self._rules, strict=True):
            part.step()
            self._check_declared(part, rule)
        for _, local in self._shards:
            local.grad = None

    def _check_declared(self, part: torch.optim.Optimizer, rule: UpdateRule) -> None:
        """Raise BadInput if the update created state that its rule does not declare. Checkpoints would not store it."""
        count = sum(map(len, part.state.values()))
        if self._checked.get(part) == count:  # nothing was added since the last check
            return
        self._checked[part] = count
        for parameter, state in part.state.items():
            if undeclared := sorted(state.keys() - {*rule.state, "step"}):
                owner = self._names.get(parameter, "the network")
                declared = ", ".join(sorted(rule.state)) or "no state"
                raise BadInput(
                    f"optimizer {self._options.optimizer}: {type(part).__name__} keeps {', '.join(undeclared)} for "
                    f"{owner}, but its rule in training/optimizers declares {declared}; add it to the rule's state, or "
                    "a resumed run would lose it"
                )

    @property
    def steps(self) -> int:
        """Number of updates that were applied: the run's steps without the blocked ones. Waits for the GPU."""
        return int(self._steps.item())

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps.fill_(count)
        for part in self.parts:
            for state in part.state.values():
                if "step" in state:
                    state["step"].fill_(count)
