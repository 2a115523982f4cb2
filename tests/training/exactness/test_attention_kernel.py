"""Attention kernel of a run: tested against unfused attention, never falling back to it. On a CPU, which has one."""

import math
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
import torch.nn.functional as F

from common.errors import BadInput
from model.config import ModelConfig
from tests.conftest import TINY_MODEL
from training.exactness import attention_kernel as attention
from training.exactness.attention_kernel import Shape, fastest, problem_of

MODEL = ModelConfig(**TINY_MODEL)
MODEL_JSON = Path("run/model.json")


def shape(precision: str = "bf16") -> Shape:
    return Shape(MODEL, 2, precision, torch.device("cpu"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_working_kernel_has_no_problem_and_a_missing_one_says_so(precision: str) -> None:
    assert problem_of("flash", shape(precision)) is None
    assert "No viable backend" in (problem_of("cudnn", shape(precision)) or "")
    assert fastest(["flash"], shape(precision)) == "flash"


def test_grouped_heads_are_tested_as_the_network_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = attrs.evolve(shape(), model=attrs.evolve(MODEL, n_heads=4, n_kv_heads=2))
    plain, seen = F.scaled_dot_product_attention, set()

    def recorded(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
        seen.add(tuple(part.shape[1] for part in inputs))
        return plain(*inputs, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    assert grouped.random_input(1).shape[-1] == (4 + 2 + 2) * 8
    assert problem_of("flash", grouped) is None
    assert seen == {(4, 4, 4)}


@pytest.mark.parametrize(("factor", "difference"), [(1.2, "0.19"), (math.nan, "nan")])
def test_a_kernel_with_wrong_gradients_is_rejected(
    monkeypatch: pytest.MonkeyPatch, factor: float, difference: str
) -> None:
    plain = F.scaled_dot_product_attention

    def wrong(queries: torch.Tensor, *others: torch.Tensor, **options: object) -> torch.Tensor:
        output = plain(queries, *others, **options)
        if queries.dtype == torch.bfloat16:  # not the reference
            output.register_hook(lambda gradient: gradient * factor)
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    assert f"differs from unfused attention by {difference} of" in (problem_of("flash", shape()) or "")


def test_too_little_memory_is_no_problem_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED")

    monkeypatch.setattr(attention, "_run", fail)
    with pytest.raises(RuntimeError, match="NVML_SUCCESS"):
        problem_of("flash", shape())


@pytest.mark.parametrize(
    ("machine", "broken", "chosen"),
    [
        (((9, 0), "off"), (), "cudnn"),
        (((9, 0), "off"), ("cudnn",), "flash"),
        (((8, 0), "off"), (), "efficient"),  # timed
        (((9, 0), "elastic"), (), "flash"),  # cuDNN's backward pass does not repeat
        (((8, 0), "run"), ("flash",), "efficient"),
    ],
)
def test_the_choice_is_by_gpu_and_by_what_is_promised_to_repeat(
    monkeypatch: pytest.MonkeyPatch,
    machine: tuple[tuple[int, int], str],
    broken: tuple[str, ...],
    chosen: str,
) -> None:
    capability, determinism = machine
    seconds = {"cudnn": 1.0, "flash": 0.99, "efficient": 0.9}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(attention, "problem_of", lambda name, _: "broken" if name in broken else None)
    monkeypatch.setattr(attention, "seconds_of", lambda name, *_: seconds[name])
    assert attention._choose(shape(), determinism, MODEL_JSON) == chosen


def test_the_kernel_chosen_is_the_only_one_left_also_for_compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = {}
    for name in ("cudnn", "flash", "mem_efficient", "math"):
        switch = lambda on, name=name: enabled.update({name: on})  # noqa: E731
        monkeypatch.setattr(torch.backends.cuda, f"enable_{name}_sdp", switch)
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    monkeypatch.setattr(attention, "_choose", lambda *_: "flash")
    monkeypatch.setattr(attention, "from_coordinator", lambda _, work: work())
    on_gpu, nobody = attrs.evolve(shape(), device=torch.device("cuda")), SimpleNamespace()
    attention.use_attention(on_gpu, "off", nobody, MODEL_JSON)
    assert enabled == {"cudnn": False, "flash": True, "mem_efficient": False, "math": False}
    assert torch.compiler.config.cache_key_tag == "attention flash"


def test_without_a_fused_kernel_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.delitem(attention.KERNELS, "flash")
    with pytest.raises(
        BadInput, match=r"^run/model.json: no fused attention kernel supports 2 heads of width 16.* Tesla T4"
    ):
        attention._choose(shape(), "off", MODEL_JSON)
