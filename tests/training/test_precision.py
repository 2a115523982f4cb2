"""Precision: what "auto" means, autocast, and the loss scale of fp16."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from tests.training.conftest import Watched
from training.precision import (
    GROWTH_INTERVAL,
    INITIAL_LOSS_SCALE,
    LossScale,
    SavedLossScale,
    autocast,
    cached_casts,
    resolve,
)

CPU = torch.device("cpu")
FINITE, OVERFLOW = torch.tensor(1.0), torch.tensor(float("inf"))


@pytest.mark.parametrize(("computes_bf16", "precision"), [(True, "bf16"), (False, "fp16")])
def test_auto_precision_depends_on_the_device(
    monkeypatch: pytest.MonkeyPatch, computes_bf16: bool, precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: computes_bf16)
    assert resolve("auto", torch.device("cuda")) == precision
    assert resolve("auto", CPU) == "fp32"
    assert resolve("fp16", CPU) == "fp16"


def test_matrix_products_use_the_precision() -> None:
    x = torch.ones(2, 2)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with autocast(precision, CPU):
            assert (x @ x).dtype == dtype


@pytest.mark.parametrize(
    ("around", "casts"), [(cached_casts(CPU), 1), (nullcontext(), 2)], ids=["cached", "not cached"]
)
def test_weight_is_cast_once_for_all_micro_batches(around: AbstractContextManager[object], casts: int) -> None:
    weight, operations = torch.ones(3, 2, requires_grad=True), list[Any]()
    x = torch.ones(4, 2, dtype=torch.bfloat16)
    with around:
        for _ in range(2):
            with autocast("bf16", CPU), Watched(lambda function, _: operations.append(function)):
                y = torch.nn.functional.linear(x, weight).sum()
            y.backward()
    assert operations.count(torch.ops.aten._to_copy.default) == casts
    assert torch.equal(weight.grad, torch.full((3, 2), 8.0))


def test_scale_halves_on_overflow_and_doubles_later() -> None:
    scale = LossScale("fp16", CPU)
    scale.update(OVERFLOW)
    assert scale.state() == SavedLossScale(scale=INITIAL_LOSS_SCALE / 2, finite_steps=0)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(FINITE)
    assert scale.state() == SavedLossScale(scale=INITIAL_LOSS_SCALE / 2, finite_steps=GROWTH_INTERVAL - 1)
    scale.update(FINITE)
    assert scale.state() == SavedLossScale(scale=INITIAL_LOSS_SCALE, finite_steps=0)


def test_scale_is_exhausted_after_many_overflows() -> None:
    scale = LossScale("fp16", CPU)
    for _ in range(16):
        scale.update(OVERFLOW)
    assert scale.scale == 1.0 and not scale.exhausted()
    scale.update(OVERFLOW)
    assert scale.exhausted()


def test_scale_is_reset_when_precision_changes() -> None:
    for precision in ("fp32", "bf16"):
        scale = LossScale(precision, CPU)
        scale.update(OVERFLOW)
        assert scale.state() == SavedLossScale(scale=1.0, finite_steps=0)
    resumed = LossScale("fp16", CPU)
    resumed.load(scale.state(), "bf16")
    assert resumed.scale == INITIAL_LOSS_SCALE
    for value in (8.0, 1.0):
        saved = SavedLossScale(scale=value, finite_steps=3)
        resumed.load(saved, "fp16")
        assert resumed.state() == saved
