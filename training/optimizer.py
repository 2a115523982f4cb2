"""The optimizer of a run: the update of all parameters, and the state that checkpoints keep."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from common.errors import BadInput
from model.axes import Axes, plain_name
from training.config.key_groups import OptimizationOptions
from training.optimizers.update_rule import RATE_FACTOR, Placement, UpdateRule, rules_of, state_bytes
from training.parallel.mesh import ON_ONE_RANK, Spread, local_parameter, local_tensor


class Optimizer:
    """Updates all parameters of a network, each by the rule of the run's optimizer that takes it.

    `state_tensors`: the tensors that checkpoints keep, by torch's name of the state and the parameter's name. They are
    sharded where the parameters are; torch's optimizers have this rank's part of both.
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
        # On all ranks together.
        self.state_bytes = state_bytes(rules, {plain_name(name): whole for name, whole in axes.items()}.values())
        taken = {name: [rule for rule in rules if rule.takes(axes[name])] for name in parameters}
        for name, takers in taken.items():
            if len(takers) != 1:
                raise BadInput(f"optimizer {options.optimizer}: {len(takers)} of its rules take {name}, wanted one")
        local = {name: local_parameter(parameter) for name, parameter in parameters.items()}
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in local.items()}
        self._shards = [(whole, local[name]) for name, whole in parameters.items() if local[name] is not whole]
        placement = Placement(device=device, axes=axes, make_spread=make_spread)
        self._options = options
        self._rules: tuple[UpdateRule, ...] = ()  # of each part
        for rule in rules:
            own = {name: local[name] for name, [taker] in taken.items() if taker is rule}
            if own:
                part = rule.build(own, options, placement)
                self.parts += (part,)
                self._rules += (rule,)
                for name, parameter in own.items():
                    # torch would begin it at the first update: a checkpoint is loaded, or written, before that
                    for kind, dtype in rule.state.items():
                        state = torch.zeros_like(parameters[name], dtype=dtype)  # sharded where the parameter is
                        part.state[parameter][kind] = local_tensor(state)
                        self.state_tensors.setdefault(kind, {})[name] = state
        self._checked: dict[torch.optim.Optimizer, int] = {}  # entries of the state that were checked
        self._fused = all(part.defaults.get("fused") for part in self.parts)
        self._steps = torch.zeros((), dtype=torch.float64, device=device)

    def set_step(self, step: int, learning_rate: float) -> None:
        """Set the hyperparameters of a step, counted from 0; groups' learning rates in proportion to the schedule's."""
        for part, rule in zip(self.parts, self._rules, strict=True):
            own = rule.settings(self._options, step)
            for group in part.param_groups:
                group.update(own, lr=learning_rate * group.get(RATE_FACTOR, 1.0))

    def step(self, held: Tensor) -> None:
        """Apply the gradients. Where the scalar `held` is 1.0, nothing changes: no parameter, state or step count."""
        if self._fused:
            for part in self.parts:
                part.found_inf = held  # type: ignore[attr-defined]  # the fused kernels' own switch
            self._update()
            self._steps += 1 - held
        elif not held.item():  # free on a CPU; on a GPU the host waits here, for kernels without a switch
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
        """Raise BadInput for state that the update has made but its rule does not declare: no checkpoint has it."""
        count = sum(map(len, part.state.values()))
        if self._checked.get(part) == count:  # nothing new since the last look
            return
        self._checked[part] = count
        for parameter, state in part.state.items():
            if undeclared := sorted(state.keys() - {*rule.state, "step"}):
                owner = self._names.get(parameter, "the whole network")
                raise BadInput(
                    f"optimizer {self._options.optimizer}: {type(part).__name__} keeps {', '.join(undeclared)} of "
                    f"{owner}, but its rule in training/optimizers declares only "
                    f"{', '.join(sorted(rule.state)) or 'none'}: a resume would lose it; add it to the rule's state"
                )

    @property
    def steps(self) -> int:
        """Number of applied updates: the run's steps, less those held back. Waits for the GPU."""
        return int(self._steps.item())

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps.fill_(count)
        for part in self.parts:
            for state in part.state.values():
                if "step" in state:
                    state["step"].fill_(count)
