"""A run's attention kernel is compared with unfused attention, which is never used for training.

These tests run on the CPU, which has one fused kernel.
"""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import BadInput
from model.config import ModelConfig
from model.gpt import GPT
from model.loss import NextTokenLoss
from tests.conftest import TINY_MODEL
from training.exactness import attention_kernel as attention
from training.exactness.attention_kernel import Shape, fastest, problem_of

MODEL = ModelConfig(**TINY_MODEL)
MODEL_JSON = Path("run/model.json")


def shape(precision: str = "bf16") -> Shape:
    return Shape(MODEL, 2, precision, torch.device("cpu"))


def test_missing_kernels_report_a_problem() -> None:
    assert "No viable backend" in (problem_of("cudnn", shape()) or "")
    for precision in ("fp32", "bf16", "fp16"):
        for tokens in (1, 2, 33, 200):  # with few tokens, gradients are only rounding errors
            small = attrs.evolve(shape(precision), model=attrs.evolve(MODEL, context_length=tokens))
            assert problem_of("flash", small) is None


LAYOUTS = [{}, {"positions": "rope"}, {"qk_norm": True}, {"n_heads": 4, "n_kv_heads": 2}]


@pytest.mark.parametrize("options", [*LAYOUTS, {"scale_attention_by_inverse_layer": True}])
def test_kernels_are_tested_with_the_networks_layout(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    network = GPT(attrs.evolve(MODEL, **options))
    plain, layouts = F.scaled_dot_product_attention, []

    def record_layout(*inputs: torch.Tensor, **other_arguments: object) -> torch.Tensor:
        output = plain(*inputs, **other_arguments)
        output.register_hook(lambda gradient: layouts.append(gradient.stride()))
        layouts.append([(part.shape, part.stride()) for part in inputs])
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", record_layout)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    NextTokenLoss(network)(tokens, tokens).backward()
    inputs = attrs.evolve(shape("fp32"), model=network.config).random_inputs(2)
    attention._run(SDPBackend.MATH, inputs, attention._random_gradient(inputs))
    assert layouts[0] == layouts[1] == layouts[-2]  # the forward pass of both layers
    assert layouts[2] == layouts[3] == layouts[-1]  # the backward pass of both layers


def test_the_formula_matches_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 5 * 32)
    for scores in attention.CASES:
        inputs = shape("fp32").random_inputs(2, scores)
        gradient = attention._random_gradient(inputs)
        assert attention._difference(SDPBackend.MATH, inputs, gradient, scores) < 1e-4


def break_kernels(monkeypatch: pytest.MonkeyPatch, change: Callable[..., torch.Tensor]) -> None:
    """Make attention return `change(output, queries, keys, values)`."""
    plain = F.scaled_dot_product_attention
    broken = lambda *inputs, **options: change(plain(*inputs, **options), *inputs)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", broken)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda gradient: gradient * 1.2, "0.2 "),
        (lambda gradient: gradient * math.nan, "nan"),
        (lambda gradient: gradient.index_fill(2, torch.tensor([31]), math.inf), "nan"),
        (lambda gradient: gradient.index_fill(2, torch.tensor([31]), 0.0), ""),  # one row of 32 is wrong
    ],
)
def test_kernels_with_wrong_gradients_are_rejected(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], difference: str
) -> None:
    def hooked(output: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            output.register_hook(change)
        return output

    break_kernels(monkeypatch, hooked)
    assert f"differs from unfused attention by {difference}" in (problem_of("flash", shape()) or "")


@pytest.mark.parametrize(
    "is_wrong",
    [
        lambda scores: scores.amax() > 50,  # the softmax is saturated
        lambda scores: scores.logsumexp(-1).amin() < -88.7,  # the sum of exponentials is too small for fp32
        lambda scores: scores.std() < 0.1,
        lambda scores: not torch.is_grad_enabled(),  # in validation
    ],
)
def test_kernels_wrong_for_some_scores_are_rejected(
    monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[torch.Tensor], bool]
) -> None:
    def scaled(output: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return output * (0.9 if is_wrong((queries @ keys.mT).float() / math.sqrt(queries.shape[-1])) else 1.0)

    break_kernels(monkeypatch, scaled)
    assert "differs from unfused attention by 0.1" in (problem_of("flash", shape()) or "")


def test_kernels_wrong_in_one_sequence_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernels(monkeypatch, lambda output, *_: torch.cat([output[:5], 0.5 * output[5:]]))
    assert "differs" in (problem_of("flash", attrs.evolve(shape(), microbatch_size=6)) or "")
    assert problem_of("flash", attrs.evolve(shape(), microbatch_size=5)) is None


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        for part in result if isinstance(result, (tuple, list)) else [result]:
            self.elements = max(self.elements, part.numel() if isinstance(part, torch.Tensor) else 0)
        return result


def test_memory_does_not_grow_quadratically_with_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 1 << 13)
    monkeypatch.setattr(attention, "COMPARED_SCORES", 1 << 20)
    long = attrs.evolve(shape(), model=attrs.evolve(MODEL, context_length=512))
    with Largest() as largest:
        assert problem_of("flash", long) is None
    assert largest.elements <= long.microbatch_size * 512 * MODEL.qkv_width


@pytest.mark.parametrize("fitting", [3, 0])
def test_kernel_tests_use_fewer_sequences_if_memory_is_short(monkeypatch: pytest.MonkeyPatch, fitting: int) -> None:
    batch_sizes, run = [], attention._run

    def limited(backend: SDPBackend, inputs: list[torch.Tensor], *other_arguments: Any) -> list[torch.Tensor]:
        batch_sizes.append(len(inputs[0]))
        if len(inputs[0]) > fitting:
            raise RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED")
        return run(backend, inputs, *other_arguments)

    monkeypatch.setattr(attention, "_run", limited)
    large = attrs.evolve(shape(), microbatch_size=8)
    if fitting:
        assert problem_of("flash", large) is None and fastest(["flash", "flash"], large) == "flash"
        assert sorted({*batch_sizes}) == [2, 4, 8]
    else:
        with pytest.raises(RuntimeError, match="NVML_SUCCESS"):
            problem_of("flash", large)
        assert batch_sizes == [8, 4, 2, 1]


@pytest.mark.parametrize(
    ("determinism", "faster", "broken", "expected"),
    [
        ("off", {"cudnn": 0.98}, (), "flash"),  # cuDNN is faster, but only within the margin
        ("off", {"cudnn": 0.9}, (), "cudnn"),
        ("off", {"cudnn": 0.9}, ("cudnn",), "flash"),
        ("off", {"cudnn": 0.9, "efficient": 0.8}, (), "efficient"),
        ("elastic", {"cudnn": 0.1, "efficient": 0.1}, (), "flash"),  # cuDNN's backward pass is not deterministic
        ("run", {"cudnn": 0.1}, ("flash",), "efficient"),
    ],
)
def test_flash_attention_is_used_unless_another_is_faster(
    monkeypatch: pytest.MonkeyPatch, determinism: str, faster: dict[str, float], broken: tuple[str, ...], expected: str
) -> None:
    seconds = {"flash": 1.0, "efficient": 1.0, "cudnn": 1.0} | faster
    monkeypatch.setattr(attention, "problem_of", lambda name, _: "broken" if name in broken else None)
    monkeypatch.setattr(attention, "seconds_of", lambda name, *_: seconds[name])
    assert attention._choose(shape(), determinism, MODEL_JSON) == expected


def test_only_the_chosen_kernel_stays_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = {}
    for name in ("cudnn", "flash", "mem_efficient", "math"):
        switch = lambda on, name=name: enabled.update({name: on})  # noqa: E731
        monkeypatch.setattr(torch.backends.cuda, f"enable_{name}_sdp", switch)
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    monkeypatch.setattr(attention, "_choose", lambda *_: "flash")
    monkeypatch.setattr(attention, "from_coordinator", lambda _, work: work())
    on_gpu, no_ranks = attrs.evolve(shape(), device=torch.device("cuda")), SimpleNamespace()
    attention.use_attention(on_gpu, "off", no_ranks, MODEL_JSON)
    assert enabled == {"cudnn": False, "flash": True, "mem_efficient": False, "math": False}
    assert torch.compiler.config.cache_key_tag == "attention flash"


@pytest.mark.parametrize(
    ("before", "problem", "expected"),
    [
        ({}, None, "cudnn"),
        ({}, "broken", "flash"),
        ({"determinism": "elastic"}, None, "flash"),  # both jobs use this level
        ({"device": "NVIDIA A100"}, None, "flash"),
        ({"attention": "flash+math"}, None, "flash"),
    ],
)
def test_resumed_runs_keep_their_kernel_on_identical_machines(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], problem: str | None, expected: str
) -> None:
    enabled: list[str] = []
    monkeypatch.setattr(attention, "_enable", enabled.append)
    monkeypatch.setattr(attention, "problem_of", lambda *_: problem)
    monkeypatch.setattr(attention, "from_coordinator", lambda _, work: work())
    present = {"determinism": "off", "attention": "flash", "device": "H100", "torch": "2", "cuda": "13", "cudnn": 9}
    recorded = present | {"attention": "cudnn"} | before
    present["determinism"] = recorded["determinism"]
    numerics = attention.keep_attention(shape(), recorded, present, SimpleNamespace())
    assert numerics == present | {"attention": expected} and enabled == ["cudnn"] * (expected == "cudnn")


def test_a_missing_fused_kernel_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.delitem(attention.KERNELS, "flash")
    message = r"^run/model.json: no fused attention kernel supports 2 heads of width 16.* Tesla T4"
    with pytest.raises(BadInput, match=message):
        attention._choose(shape(), "off", MODEL_JSON)
