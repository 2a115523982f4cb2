"""Attention kernel of a run on a GPU: one fused kernel, tested and timed before the first step.

By default torch falls back to unfused attention, with T x T matrices and no warning, where no fused kernel supports the
inputs. The fastest fused kernel depends on the GPU: at training shapes cuDNN's leads on Hopper (1.7 to 2.3 times
flash-attention 2) and trails on A100, A10G and RTX PRO 6000 (huggingface/transformers, pull request 48163). It is also
the one with public reports of wrong results (pytorch/pytorch, issues 193893, 196678): flash attention comes first.
"""

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
import torch.compiler.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.errors import BadInput
from model.config import ModelConfig
from model.gpt import Attention, repeat_heads, rotation_at
from training.hardware.usable_gpus import is_memory_error
from training.parallel.process_group import Ranks, from_coordinator
from training.precision import AUTOCAST_DTYPES

KERNELS = {  # in the order of preference
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
REPEATING = ("flash", "efficient")  # with a deterministic backward pass
ROUNDS = 10  # timed runs of a kernel
TIMED_SEQUENCES = 8  # at most: enough to fill a GPU, small beside the run itself
FASTER_SHARE = 0.03  # a later kernel is chosen only if faster by this share
# Share of the largest reference output or gradient: bf16 rounds to 0.004. Of values and gradients it counts at least as
# 1, times the deviation for those of queries and keys, as it is but in a few saturated rows, which rounding fills.
TOLERANCE = 0.05
COMPARED_SCORES = 1 << 30  # of a test, but at least of two heads
SCORES_AT_ONCE = 1 << 24  # of the formula: 64 MiB in fp32
SAME_MACHINE = ("device", "torch", "cuda", "cudnn")  # fields of the numerics with which a kernel stays as fast

T = TypeVar("T")


@attrs.frozen
class ScoreCase:
    """Random scores of a test: queries and keys have this deviation; a shift lowers all scores alike."""

    deviation: float
    shift: float = 0.0


# The first are those of networks with QK-norm. The last: a head with "massive activations", whose sums of exponentials
# fp32 cannot invert: the backward pass of a wrong kernel has NaN there.
CASES = (ScoreCase(1.0), ScoreCase(0.1), ScoreCase(6.0), ScoreCase(0.1, shift=-120.0))


@attrs.frozen
class Shape:
    """Shape, precision and device of the run's attention."""

    model: ModelConfig
    microbatch_size: int
    precision: str
    device: torch.device

    @torch.no_grad()
    def random_inputs(self, sequences: int, scores: ScoreCase = CASES[0]) -> list[Tensor]:
        """Return queries, keys and values of so many sequences, (B, H, T, D) each, laid out as a block has them."""
        generator, length = torch.Generator(self.device).manual_seed(CASES.index(scores)), self.model.context_length
        dtype = AUTOCAST_DTYPES.get(self.precision, torch.float32)  # as autocast would have it
        size = (sequences, length, self.model.qkv_width)
        fused = torch.randn(size, generator=generator, device=self.device, dtype=dtype)
        with self.device:
            block, positions = Attention(self.model, layer=0).to(self.device), torch.arange(length)
        rotation = rotation_at(positions, self.model) if self.model.positions == "rope" else None
        queries, *grouped = block.split(fused, rotation)
        for part in (queries, grouped[0]):
            part.mul_(scores.deviation)
        if scores.shift:
            queries[..., 0], grouped[0][..., 0] = 1.0, scores.shift * math.sqrt(self.model.head_width)
        return [queries, *(repeat_heads(part, self.model.n_heads) for part in grouped)]


def use_attention(shape: Shape, determinism: str, ranks: Ranks, model_json: Path) -> None:
    """Enable one attention kernel, on every rank the same. Raises BadInput if none supports the shape."""
    _enable(from_coordinator(ranks, lambda: _choose(shape, determinism, model_json)))


def keep_attention(shape: Shape, before: dict[str, Any], now: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Enable the kernel of a checkpoint where this job timed another as fastest; return the numerics with it."""
    name = before.get("attention")
    if now["determinism"] != "off" or name == now["attention"] or name not in KERNELS:
        return now
    other_machine = any(before.get(field) != now[field] for field in SAME_MACHINE)
    if other_machine or from_coordinator(ranks, lambda: problem_of(name, shape)) is not None:
        return now
    _enable(name)
    return now | {"attention": name}


def _enable(name: str) -> None:
    backends = torch.backends.cuda
    backends.enable_cudnn_sdp(name == "cudnn")
    backends.enable_flash_sdp(name == "flash")
    backends.enable_mem_efficient_sdp(name == "efficient")
    backends.enable_math_sdp(False)
    # torch.compile's disk caches ignore these switches: they would return a graph with another kernel.
    torch.compiler.config.cache_key_tag = f"attention {name}"
    torch.cuda.empty_cache()  # memory of the trials would fragment the run's


def problem_of(name: str, shape: Shape) -> str | None:
    """Test a kernel's outputs and gradients against unfused attention; return the problem, or None."""
    return _in_memory(shape.microbatch_size, partial(_problem, name, shape))


def fastest(names: list[str], shape: Shape) -> str:
    """Return the fastest kernel, forward and backward; a later one only if faster by FASTER_SHARE."""
    chosen, least = names[0], math.inf
    most = min(shape.microbatch_size, TIMED_SEQUENCES)
    for name in names if len(names) > 1 else []:
        seconds = _in_memory(most, partial(seconds_of, name, shape))
        if seconds < (1 - FASTER_SHARE) * least:
            chosen, least = name, seconds
    return chosen


def seconds_of(name: str, shape: Shape, sequences: int) -> float:
    """Return the minimum of several timings, forward and backward."""
    inputs, timings = shape.random_inputs(sequences), []
    gradient = _random_gradient(inputs)
    for _ in range(ROUNDS):
        began = time.perf_counter()
        _run(KERNELS[name], inputs, gradient, shape.model.drop_rate)
        if shape.device.type == "cuda":
            torch.cuda.synchronize(shape.device)
        timings.append(time.perf_counter() - began)
    return min(timings)


def formula(inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Return causal attention of fp32 queries, keys and values (N, T, D), and their gradients: some rows at a time."""
    queries, keys, values = leaves = [part.detach().requires_grad_() for part in inputs]
    outputs, length, scale = [], queries.shape[1], 1 / math.sqrt(queries.shape[2])
    rows = max(1, SCORES_AT_ONCE // (len(queries) * length))
    for first in range(0, length, rows):
        own, seen = slice(first, first + rows), slice(0, first + rows)  # no row sees a later key
        scores = scale * queries[:, own] @ keys[:, seen].mT
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(first + 1)
        outputs.append(scores.masked_fill(later, -math.inf).softmax(-1) @ values[:, seen])
        outputs[-1].backward(gradient[:, own])
    return [torch.cat(outputs, 1).detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _choose(shape: Shape, determinism: str, model_json: Path) -> str:
    allowed = [name for name in KERNELS if determinism == "off" or name in REPEATING]
    problems = {name: problem_of(name, shape) for name in allowed}
    working = [name for name, problem in problems.items() if problem is None]
    if not working:
        reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        heads, tokens = shape.model.n_heads, shape.model.context_length
        raise BadInput(
            f"{model_json}: no fused attention kernel supports {heads} heads of width {shape.model.head_width} "
            f"in {shape.precision} on {torch.cuda.get_device_name(shape.device)} ({reasons}); unfused attention would "
            f"need {tokens} x {tokens} matrices: choose n_heads so that emb_dim / n_heads is 64 or 128"
        )
    return fastest(working, shape) if determinism == "off" else working[0]


def _in_memory(sequences: int, work: Callable[[int], T]) -> T:
    """Return the work's result on so many sequences, or on fewer where memory ends. Raises where one does not fit."""
    while True:
        try:
            return work(sequences)
        except RuntimeError as error:
            if sequences == 1 or not is_memory_error(error):
                raise
        sequences //= 2
        torch.cuda.empty_cache()


def _problem(name: str, shape: Shape, sequences: int) -> str | None:
    for scores in CASES:
        inputs = shape.random_inputs(sequences, scores)
        gradient = _random_gradient(inputs)
        try:
            worst = _difference(KERNELS[name], inputs, gradient, scores)
            if shape.model.drop_rate > 0:
                _run(KERNELS[name], inputs, gradient, shape.model.drop_rate)
        except RuntimeError as error:  # torch: no available kernel
            if is_memory_error(error):
                raise
            return str(error).partition("\n")[0].rstrip(".")
        if not worst <= TOLERANCE:
            return f"differs from unfused attention by {worst:.2g} of its largest value"
    return None


def _difference(backend: SDPBackend, inputs: list[Tensor], gradient: Tensor, scores: ScoreCase) -> float:
    """Return the largest difference of outputs and gradients in some heads, as a share; NaN if any is not finite."""
    found = _run(backend, inputs, gradient)
    with torch.no_grad():
        found.append(_attend(backend, inputs, 0.0))  # as validation runs it
    worst = [0.0 * torch.linalg.vector_norm(part, math.inf, dtype=torch.float32) for part in found]  # inf: NaN
    batch, heads, length, width = inputs[0].shape
    gradients = gradient.unflatten(2, (heads, width)).transpose(1, 2)
    least = (1.0, scores.deviation, scores.deviation, 1.0, 1.0)
    # A shift lies in the first channel of queries and keys, whose gradients are rounding errors then.
    channels = slice(1 if scores.shift else 0, None)
    pairs = torch.linspace(0, batch * heads - 1, min(batch * heads, max(2, COMPARED_SCORES // length**2))).long()
    for some in pairs.split(max(1, SCORES_AT_ONCE // length**2)):
        chosen = (some // heads, some % heads)
        wanted = formula([part[chosen].float() for part in inputs], gradients[chosen].float())
        for part, reference, floor in zip(found, [*wanted, wanted[0]], least, strict=True):
            difference = (part[chosen] - reference)[..., channels].abs().max()
            worst.append(difference / reference[..., channels].abs().max().clamp(min=floor))
    return torch.stack(worst).max().item()  # torch's maximum: NaN where one of them is


def _random_gradient(inputs: list[Tensor]) -> Tensor:
    """Return a gradient of the heads' outputs side by side, (B, T, C), as the output matrix gives it."""
    batch, heads, length, width = inputs[0].shape
    generator = torch.Generator(inputs[0].device).manual_seed(0)
    size = (batch, length, heads * width)
    return torch.randn(size, generator=generator, device=inputs[0].device, dtype=inputs[0].dtype)


def _run(backend: SDPBackend, inputs: list[Tensor], gradient: Tensor, drop_rate: float = 0.0) -> list[Tensor]:
    """Return the output, and the gradients of queries, keys and values: (B, H, T, D) each."""
    leaves = [part.detach().requires_grad_() for part in inputs]
    output = _attend(backend, leaves, drop_rate)
    gradients = torch.autograd.grad(output.transpose(1, 2).flatten(2), leaves, gradient)
    return [output.detach(), *gradients]


def _attend(backend: SDPBackend, inputs: list[Tensor], drop_rate: float) -> Tensor:
    with sdpa_kernel(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about each kernel that it rejects
        queries, keys, values = inputs
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=drop_rate)
