"""The attention kernel of a run is one that was tried, never the formula. On a CPU: torch has a fused kernel there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from errors import BadInput
from model.config import ModelConfig
from tests.conftest import TINY_MODEL
from training import attention
from training.attention import Shape, fastest, problem_of
from training.config import load_run
from training.numerics import Numerics

MODEL = ModelConfig(**TINY_MODEL)
OFF = Numerics(determinism="off", precision="bf16", compiled=False)


def shape(precision: str = "bf16") -> Shape:
    return Shape.of(MODEL, 2, precision, torch.device("cpu"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_kernel_that_works_has_no_problem_and_one_that_is_not_there_says_so(precision: str) -> None:
    assert problem_of("flash", shape(precision)) is None
    assert "No viable backend" in (problem_of("cudnn", shape(precision)) or "")
    assert fastest(["flash"], shape(precision)) == "flash"


def test_a_kernel_whose_gradients_are_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.scaled_dot_product_attention

    def wrong(queries: torch.Tensor, *others: torch.Tensor, **options: object) -> torch.Tensor:
        output = plain(queries, *others, **options)
        if queries.dtype == torch.bfloat16:  # not the formula's run
            output.register_hook(lambda gradient: gradient * 1.2)
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    assert "differs from the formula by 0.19 of" in (problem_of("flash", shape()) or "")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_what_works_is_chosen_before_what_is_preferred(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert attention._choose(load_run(make_run(), []), OFF, shape()) == "flash"


def test_where_only_the_formula_is_left_it_is_one_line(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.delitem(attention.KERNELS, "flash")
    with pytest.raises(BadInput, match=r"model.json: no fused attention kernel takes 2 heads of width 16.* Tesla T4"):
        attention._choose(load_run(make_run(), []), OFF, shape())
