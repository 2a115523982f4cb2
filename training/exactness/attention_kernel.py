"""Which kernel computes attention on a GPU: one for the whole run, tried before the first step, never the formula.

Left to itself, torch falls back to the formula where no fused kernel takes the inputs, T x T matrices and all, without
a word. Which fused one is the fastest depends on the GPU: with training's shapes cuDNN's leads on Hopper (1.7 to 2.3
times flash-attention 2) and trails on A100, A10G and RTX PRO 6000 (huggingface/transformers, pull request 48163).
"""

import math
import time
import warnings

import attrs
import torch
import torch.compiler.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.errors import BadInput
from model.config import ModelConfig
from model.gpt import split_heads
from training.config.train_config import Run
from training.parallel.process_group import Ranks, from_coordinator
from training.precision import DTYPES, Numerics

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
REPEATING = ("flash", "efficient")  # whose backward pass has a variant that repeats to the bit
CUDNN_FIRST = (9, 10)  # compute capabilities, major: Hopper, and Blackwell as torch does; others are timed
ROUNDS = 10  # of a timing
TIMED_SEQUENCES = 8  # at most: enough to fill a GPU, and little beside what a run will hold
MARGIN = 0.03  # by which another kernel has to be faster than one that comes before it
TOLERANCE = 0.05  # of the largest value of the formula's output or gradients: bf16 rounds to 0.004


@attrs.frozen(kw_only=True)
class Shape:
    """Attention as the run's blocks call it."""

    microbatch_size: int
    tokens: int
    heads: int
    width: int  # of a head
    drop_rate: float
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: ModelConfig, microbatch_size: int, precision: str, device: torch.device) -> "Shape":
        """Return that of a network's micro-batch."""
        return cls(
            microbatch_size=microbatch_size,
            tokens=model.context_length,
            heads=model.n_heads,
            width=model.emb_dim // model.n_heads,
            drop_rate=model.drop_rate,
            dtype=DTYPES.get(precision, torch.float32),
            device=device,
        )


def use_attention(run: Run, numerics: Numerics, ranks: Ranks) -> None:
    """Leave torch one attention kernel, the same on every rank, for as long as this process lives; none on a CPU.

    Call it on every rank. Raises BadInput when no fused kernel takes the run's shape.
    """
    if ranks.device.type != "cuda":
        return  # one fused kernel; what it does not take, dropout, is for the formula
    shape = Shape.of(run.model, run.train.batch.microbatch_size, numerics.precision, ranks.device)
    name = from_coordinator(ranks, lambda: _choose(run, numerics, shape))
    backends = torch.backends.cuda
    backends.enable_cudnn_sdp(name == "cudnn")
    backends.enable_flash_sdp(name == "flash")
    backends.enable_mem_efficient_sdp(name == "efficient")
    backends.enable_math_sdp(False)
    # torch.compile's caches on the disk do not know of these switches: a graph with another kernel would come back.
    torch.compiler.config.cache_key_tag = f"attention {name}"
    torch.cuda.empty_cache()  # what the trials took: a run's weights would lie in pieces of it


def problem_of(name: str, shape: Shape) -> str | None:
    """Return why a kernel cannot compute this attention and its gradients, or None: tried beside the formula."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(1, shape.tokens, 3 * shape.heads * shape.width, generator=generator).to(shape.device)
    try:
        _run(KERNELS[name], shape, fused.to(shape.dtype), shape.drop_rate)
        found = _run(KERNELS[name], shape, fused.to(shape.dtype))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch: no available kernel
        return str(error).partition("\n")[0].rstrip(".")
    wanted = _run(SDPBackend.MATH, shape, fused)
    differences = [(one - other).abs().max() / other.abs().max() for one, other in zip(found, wanted, strict=True)]
    worst = torch.stack(differences).max().item()  # torch's maximum: NaN where one of them is
    return None if worst <= TOLERANCE else f"differs from the formula by {worst:.2g} of its largest value"


def fastest(names: list[str], shape: Shape) -> str:
    """Return the kernel that takes the least time, forward and backward, by a margin over those before it."""
    sequences = min(shape.microbatch_size, TIMED_SEQUENCES)
    fused = torch.randn(sequences, shape.tokens, 3 * shape.heads * shape.width, device=shape.device).to(shape.dtype)
    seconds = {name: seconds_of(name, shape, fused) for name in names}
    chosen = names[0]
    for name in names[1:]:
        if seconds[name] < (1 - MARGIN) * seconds[chosen]:
            chosen = name
    return chosen


def seconds_of(name: str, shape: Shape, fused: Tensor) -> float:
    """Return the least of several timings, forward and backward."""
    least = math.inf
    for _ in range(ROUNDS):
        began = time.perf_counter()
        _run(KERNELS[name], shape, fused, shape.drop_rate)
        if shape.device.type == "cuda":
            torch.cuda.synchronize(shape.device)
        least = min(least, time.perf_counter() - began)
    return least


def _choose(run: Run, numerics: Numerics, shape: Shape) -> str:
    problems: dict[str, str | None] = {}
    for name in KERNELS if numerics.determinism == "off" else REPEATING:
        problems[name] = problem_of(name, shape)
    working = [name for name, problem in problems.items() if problem is None]
    if not working:
        reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise BadInput(
            f"{run.directory / 'model.json'}: no fused attention kernel takes {shape.heads} heads of width "
            f"{shape.width} in {numerics.precision} on {torch.cuda.get_device_name(shape.device)} ({reasons}); the "
            f"formula would hold {shape.tokens} x {shape.tokens} matrices: choose n_heads so that emb_dim / n_heads "
            "is 64 or 128"
        )
    hopper = torch.cuda.get_device_capability(shape.device)[0] in CUDNN_FIRST
    return working[0] if hopper or numerics.determinism != "off" else fastest(working, shape)


def _run(backend: SDPBackend, shape: Shape, fused: Tensor, drop_rate: float = 0.0) -> list[Tensor]:
    """Return output and gradient of the fused queries, keys and values, (B, T, 3 C), in fp32."""
    fused = fused.detach().requires_grad_()
    queries, keys, values = (split_heads(part, shape.heads) for part in fused.chunk(3, dim=-1))
    with sdpa_kernel(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each kernel that it does not choose
        output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=drop_rate)
        output.float().square().sum().backward()
    assert fused.grad is not None
    return [output.detach().float(), fused.grad.float()]
