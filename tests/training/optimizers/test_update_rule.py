"""A new optimizer needs only a file and a registration: its state is saved, resumed and included in predictions."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from common.errors import BadInput
from model.axes import Axes, Axis
from model.config import ModelConfig
from tests.conftest import TINY_MODEL, MakeRun, complete, metrics, train
from tests.training.optimizers import sign_descent
from training.config.key_groups import OPTIMIZERS, OptimizationOptions
from training.config.train_config import load_run
from training.optimizer import Optimizer
from training.optimizers import adamw
from training.optimizers.update_rule import UpdateRule
from training.planning.memory_model import MemoryModel

SCRIPT = Path(__file__).with_name("sign_descent.py")
AXES = Axes(rows=(Axis("embed", 2),), columns=Axis("embed", 2), embedding=False)
HASHED = ("--set", "optimizer=sign", "--hash-every", "1")


def test_registered_optimizers_train_save_and_resume(make_run: MakeRun) -> None:
    straight, resumed = make_run("straight"), make_run("resumed")
    complete(straight, *HASHED, script=SCRIPT)
    complete(resumed, *HASHED, "--max-steps", "4", ranks=2, script=SCRIPT)
    process = train(resumed, *HASHED, script=SCRIPT)
    assert process.returncode == 0 and "step-00000004 at step 4 of 8" in process.stdout, process.stderr
    assert "optimizer    sign descent" in process.stdout
    assert metrics(resumed, "state_sha256") == metrics(straight, "state_sha256")
    assert len(set(metrics(straight, "state_sha256").values())) == 8
    with safe_open(straight / "checkpoints" / "latest" / "optimizer.safetensors", framework="pt") as file:
        momentum = file.get_slice("momentum.token_embedding.weight")
        assert (momentum.get_dtype(), momentum.get_shape()) == ("BF16", [257, 32])


def test_registered_optimizers_are_planned(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=f"optimizer: got 'sign', wanted .*{list(OPTIMIZERS)[-1]}"):
        load_run(make_run("unknown"), ["optimizer=sign"])
    monkeypatch.setitem(OPTIMIZERS, "sign", "sign descent")
    monkeypatch.setitem(sys.modules, "training.optimizers.sign", sign_descent)
    run = load_run(make_run(), ["optimizer=sign"])
    adamw = MemoryModel(model=ModelConfig(**TINY_MODEL), world_size=8)
    memory = MemoryModel.of(run.model, run.train, 8)
    assert memory.predict(1).parts["optimizer"] == adamw.predict(1).parts["optimizer"] // 4


def optimizer_of_a_weight() -> Optimizer:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    return Optimizer({"weight": weight}, {"weight": AXES}, OptimizationOptions(), torch.device("cpu"))


def test_undeclared_optimizer_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = UpdateRule(state={}, build=lambda parameters, _, __: torch.optim.SGD(parameters.values(), momentum=0.9))
    monkeypatch.setattr(adamw, "RULES", (rule,))
    with pytest.raises(BadInput, match=r"SGD keeps momentum_buffer for weight, .* a resumed run would lose it"):
        optimizer_of_a_weight().step(torch.tensor(0.0))


@pytest.mark.parametrize("count", [0, 2])
def test_exactly_one_rule_takes_each_parameter(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(adamw, "RULES", adamw.RULES * count)
    with pytest.raises(BadInput, match=f"optimizer adamw: {count} of its rules take weight, wanted exactly one"):
        optimizer_of_a_weight()
