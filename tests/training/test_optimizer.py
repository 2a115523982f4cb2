"""AdamW, alone or together with Muon: the parameters of each rule, their rates and decay, and blocked updates."""

from typing import Any

import attrs
import pytest
import torch

from common.errors import BadInput
from model.axes import axes_of
from model.config import ModelConfig
from model.gpt import GPT, initialize
from tests.conftest import TINY_MODEL
from training.config.key_groups import OptimizationOptions
from training.optimizer import Optimizer
from training.optimizers.update_rule import UpdateRule
from training.planning.memory_model import MemoryModel

CONFIG = ModelConfig(**TINY_MODEL | {"tie_weights": False})
MATRICES = {
    f"blocks.{block}.{matrix}.weight"
    for block in range(2)
    for matrix in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
}
OPTIMIZATION = attrs.fields_dict(OptimizationOptions)
BLOCKED, APPLIED = torch.tensor(1.0), torch.tensor(0.0)


def make(**keys: Any) -> tuple[dict[str, torch.nn.Parameter], Optimizer]:
    """Return parameters with random gradients, and their optimizer."""
    network = GPT(CONFIG)
    initialize(network, 0)
    parameters = dict(network.named_parameters())
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    axes = {name: axes_of(name, CONFIG) for name in parameters}
    return parameters, Optimizer(parameters, axes, OptimizationOptions(**keys), torch.device("cpu"))


def state(parameters: dict[str, torch.nn.Parameter], optimizer: Optimizer) -> dict[str, torch.Tensor]:
    moments = {
        f"{kind}.{name}": tensor
        for kind, tensors in optimizer.state_tensors.items()
        for name, tensor in tensors.items()
    }
    return {name: tensor.detach().clone() for name, tensor in (parameters | moments).items()}


RATES = {
    "matrix_learning_rate": 0.02,
    "embedding_learning_rate": 0.3,
    "head_learning_rate": 0.004,
    "vector_learning_rate": 0.07,
}


def rates_of(parameters: dict[str, torch.nn.Parameter], optimizer: Optimizer) -> dict[str, tuple[float, float]]:
    """Return the learning rate and the weight decay of each parameter."""
    groups = [group for part in optimizer.parts for group in part.param_groups]
    by_id = {id(parameter): (group["lr"], group["weight_decay"]) for group in groups for parameter in group["params"]}
    return {name: by_id[id(parameter)] for name, parameter in parameters.items()}


@pytest.mark.parametrize("rule_name", ["adamw", "muon"])
def test_each_group_has_its_rate_on_the_schedule(rule_name: str) -> None:
    parameters, optimizer = make(optimizer=rule_name, learning_rate=0.01, weight_decay=0.1, **RATES)
    for scheduled_rate in (0.01, 0.005):
        optimizer.set_step(0, scheduled_rate)
        rates, share = rates_of(parameters, optimizer), scheduled_rate / 0.01
        for name, (rate, decay) in rates.items():
            kind = "vector" if parameters[name].dim() < 2 else name.partition(".")[0]
            group = {"vector": "vector", "blocks": "matrix", "head": "head"}.get(kind, "embedding")
            assert rate == pytest.approx(RATES[f"{group}_learning_rate"] * share), name
            assert decay == (0.0 if group == "vector" else 0.1), name


@pytest.mark.parametrize("rule_name", ["adamw", "muon"])
def test_default_groups_follow_schedule(rule_name: str) -> None:
    parameters, optimizer = make(optimizer=rule_name, weight_decay=0.3)
    optimizer.set_step(0, 0.0037)
    decays = {name: 0.3 if name.endswith("weight") and "norm" not in name else 0.0 for name in parameters}
    assert rates_of(parameters, optimizer) == {name: (0.0037, decay) for name, decay in decays.items()}
    assert [len(part.param_groups) for part in optimizer.parts] == ([2] if rule_name == "adamw" else [2, 1])
    # 4e-4 is also the default of learning_rate, so this optimizer has the same rates.
    parameters_2, optimizer_2 = make(optimizer=rule_name, weight_decay=0.3, head_learning_rate=4e-4)
    optimizer_2.set_step(0, 0.0037)
    assert rates_of(parameters_2, optimizer_2) == rates_of(parameters, optimizer)


def test_muon_takes_block_matrices_and_adamw_the_rest() -> None:
    parameters, optimizer = make(optimizer="muon")
    state_tensors = optimizer.state_tensors
    assert state_tensors.keys() == {"exp_avg", "exp_avg_sq", "momentum_buffer"}
    assert state_tensors["momentum_buffer"].keys() == MATRICES
    assert state_tensors["exp_avg"].keys() == state_tensors["exp_avg_sq"].keys() == parameters.keys() - MATRICES
    total = sum(4 * tensor.numel() for tensors in state_tensors.values() for tensor in tensors.values())
    assert MemoryModel(model=CONFIG, optimizer="muon").predict(1).parts["optimizer"] == optimizer.state_bytes == total


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_blocked_update_changes_nothing(name: str) -> None:
    parameters, optimizer = make(optimizer=name)
    before = state(parameters, optimizer)
    optimizer.step(BLOCKED)
    assert optimizer.steps == 0
    assert all(torch.equal(tensor, before[key]) for key, tensor in state(parameters, optimizer).items())
    optimizer.step(APPLIED)
    assert optimizer.steps == 1
    assert not any(torch.equal(tensor, before[key]) for key, tensor in state(parameters, optimizer).items())


def test_adamw_and_muon_take_steps_of_similar_size() -> None:
    sizes = {}
    for name in ("adamw", "muon"):
        parameters, optimizer = make(optimizer=name, weight_decay=0.0)
        before = state(parameters, optimizer)
        optimizer.set_step(0, 0.01)
        for _ in range(20):
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape)
            optimizer.step(APPLIED)
        sizes[name] = {key: (parameters[key] - before[key]).square().mean().sqrt().item() for key in MATRICES}
    for key in MATRICES:
        assert 0.3 < sizes["muon"][key] / sizes["adamw"][key] < 3, key


class Shadowed(torch.optim.SGD):
    """An optimizer that keeps a tensor for its last parameter, although its rule declares no such tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        last = self.param_groups[-1]["params"][-1]
        self.state[last]["shadow"] = last.detach().clone()


def test_undeclared_optimizer_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = UpdateRule(state={}, build=lambda parameters, options, placement: Shadowed(parameters.values(), lr=0.1))
    monkeypatch.setattr("training.optimizer.rules_of", lambda name: (rule,))
    parameters, optimizer = make()
    problem = f"optimizer adamw: Shadowed keeps shadow for {[*parameters][-1]}, but its rule .* declares no state"
    with pytest.raises(BadInput, match=problem):
        optimizer.step(APPLIED)
