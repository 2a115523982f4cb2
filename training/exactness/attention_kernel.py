"""Attention kernel of a run on a GPU: one fused kernel, tested and timed before the first step.

By default torch falls back to unfused attention, with T x T matrices and no warning, where no fused kernel supports the
inputs. The fastest fused kernel depends on the GPU: at training shapes cuDNN's leads on Hopper (1.7 to 2.3 times
flash-attention 2) and trails on A100, A10G and RTX PRO 6000 (huggingface/transformers, pull request 48163).
"""

import math
import time
import warnings
from pathlib import Path

import attrs
import torch
import torch.compiler.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.errors import BadInput
from model.config import ModelConfig
from model.gpt import repeat_heads, split_heads
from training.hardware.memory_errors import is_memory_error
from training.parallel.process_group import Ranks, from_coordinator
from training.precision import DTYPES

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
REPEATING = ("flash", "efficient")  # with a deterministic backward pass
CUDNN_FIRST = (9, 10)  # compute capabilities, major: Hopper, and Blackwell as torch does; others are timed
ROUNDS = 10  # timed runs of a kernel
TIMED_SEQUENCES = 8  # at most: enough to fill a GPU, small beside the run itself
MARGIN = 0.03  # a later kernel is chosen only if faster by this share
TOLERANCE = 0.05  # share of the largest reference output or gradient: bf16 rounds to 0.004


@attrs.frozen
class Shape:
    """Shape, precision and device of the run's attention."""

    model: ModelConfig
    microbatch_size: int
    precision: str
    device: torch.device

    def random_input(self, sequences: int) -> Tensor:
        """Return random queries, keys and values of some sequences, fused, fp32 (B, T, (H + 2 K) D)."""
        size = (sequences, self.model.context_length, self.model.qkv_width)
        return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(self.device)

    def in_precision(self, fused: Tensor) -> Tensor:
        """Return the input as autocast would."""
        return fused.to(DTYPES.get(self.precision, torch.float32))


def use_attention(shape: Shape, determinism: str, ranks: Ranks, model_json: Path) -> None:
    """Enable one attention kernel, the same on every rank, for the life of this process; on a CPU do nothing.

    Call it on every rank. Raises BadInput, blaming `model_json`, if no fused kernel supports the shape.
    """
    if shape.device.type != "cuda":
        return  # torch has one fused kernel there, and unfused attention for dropout
    name = from_coordinator(ranks, lambda: _choose(shape, determinism, model_json))
    backends = torch.backends.cuda
    backends.enable_cudnn_sdp(name == "cudnn")
    backends.enable_flash_sdp(name == "flash")
    backends.enable_mem_efficient_sdp(name == "efficient")
    backends.enable_math_sdp(False)
    # torch.compile's disk caches ignore these switches: they would return a graph with another kernel.
    torch.compiler.config.cache_key_tag = f"attention {name}"
    torch.cuda.empty_cache()  # memory of the trials would fragment the run's


def problem_of(name: str, shape: Shape) -> str | None:
    """Test a kernel's output and gradients against unfused attention; return what is wrong, or None."""
    fused = shape.random_input(1)
    try:
        _run(KERNELS[name], shape, shape.in_precision(fused), shape.model.drop_rate)
        found = _run(KERNELS[name], shape, shape.in_precision(fused))
    except RuntimeError as error:  # torch: no available kernel
        if is_memory_error(error):
            raise
        return str(error).partition("\n")[0].rstrip(".")
    wanted = _run(SDPBackend.MATH, shape, fused)
    differences = [(one - other).abs().max() / other.abs().max() for one, other in zip(found, wanted, strict=True)]
    worst = torch.stack(differences).max().item()  # torch's maximum: NaN where one of them is
    return None if worst <= TOLERANCE else f"differs from unfused attention by {worst:.2g} of its largest value"


def fastest(names: list[str], shape: Shape) -> str:
    """Return the fastest kernel, forward and backward; a later one only if faster by MARGIN."""
    fused = shape.in_precision(shape.random_input(min(shape.microbatch_size, TIMED_SEQUENCES)))
    chosen, least = names[0], math.inf
    for name in names:
        seconds = seconds_of(name, shape, fused)
        if seconds < (1 - MARGIN) * least:
            chosen, least = name, seconds
    return chosen


def seconds_of(name: str, shape: Shape, fused: Tensor) -> float:
    """Return the minimum of several timings, forward and backward."""
    timings = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        _run(KERNELS[name], shape, fused, shape.model.drop_rate)
        if shape.device.type == "cuda":
            torch.cuda.synchronize(shape.device)
        timings.append(time.perf_counter() - began)
    return min(timings)


def _choose(shape: Shape, determinism: str, model_json: Path) -> str:
    allowed = KERNELS if determinism == "off" else REPEATING
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
    hopper = torch.cuda.get_device_capability(shape.device)[0] in CUDNN_FIRST
    return working[0] if hopper or determinism != "off" else fastest(working, shape)


def _run(backend: SDPBackend, shape: Shape, fused: Tensor, drop_rate: float = 0.0) -> list[Tensor]:
    """Return the output, and the gradient of the fused queries, keys and values (B, T, (H + 2 K) D), in fp32."""
    fused = fused.detach().requires_grad_()
    queries, *grouped = split_heads(fused, shape.model.qkv_heads)
    keys, values = (repeat_heads(part, shape.model.n_heads) for part in grouped)
    with sdpa_kernel(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about each kernel that it rejects
        output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=drop_rate)
        output.float().square().sum().backward()
    assert fused.grad is not None
    return [output.detach().float(), fused.grad.float()]
