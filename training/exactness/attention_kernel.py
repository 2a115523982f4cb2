"""The attention kernel of a run on a GPU: a fused kernel that is tested and timed before the first step.

By default, if no fused kernel supports the inputs, torch silently uses unfused attention with T x T matrices. The
fastest fused kernel depends on the GPU: at training shapes, cuDNN's kernel is the fastest on Hopper (1.7 to 2.3 times
as fast as flash-attention 2) and slower on A100, A10G and RTX PRO 6000 (huggingface/transformers, pull request 48163).
There are also public reports of wrong results from cuDNN's kernel (pytorch/pytorch, issues 193893, 196678). Flash
attention is therefore preferred.
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
REPEATING = ("flash", "efficient")  # kernels with a deterministic backward pass
ROUNDS = 10  # timed runs of a kernel
TIMED_SEQUENCES = 8  # at most this many in a timed run; enough to fill a GPU, and cheap compared with training
FASTER_SHARE = 0.03  # a later kernel is chosen only if it is faster by this share
# Largest accepted error, relative to the largest reference output or gradient. For comparison, rounding to bf16 changes
# a value by up to 0.004. If the largest reference value is below a minimum, the error is relative to the minimum. The
# minimum is `ScoreCase.deviation` for the gradients of queries and keys, and 1 for all other tensors. Only a few
# saturated rows, which consist mostly of rounding errors, have smaller values.
TOLERANCE = 0.05
COMPARED_SCORES = 1 << 30  # a test compares about this many scores, but always at least two heads
SCORES_AT_ONCE = 1 << 24  # number of scores that `formula` computes at a time: 64 MiB in fp32
SAME_MACHINE = ("device", "torch", "cuda", "cudnn")  # the speed of kernels depends on these fields of the numerics

T = TypeVar("T")


@attrs.frozen
class ScoreCase:
    """The random scores of a test: the standard deviation of queries and keys, and a shift of all scores."""

    deviation: float
    shift: float = 0.0


# The first case occurs in networks with QK-norm. The last case is a head with "massive activations". The
# head's sums of exponentials cannot be inverted in fp32, and the backward pass of a faulty kernel returns NaN.
CASES = (ScoreCase(1.0), ScoreCase(0.1), ScoreCase(6.0), ScoreCase(0.1, shift=-120.0))


@attrs.frozen
class Shape:
    """The shape, precision and device of the run's attention."""

    model: ModelConfig
    microbatch_size: int
    precision: str
    device: torch.device

    @torch.no_grad()
    def random_inputs(self, sequences: int, scores: ScoreCase = CASES[0]) -> list[Tensor]:
        """Return random queries, keys and values of this many sequences, (B, H, T, D) each.

        Their memory layout is the same as in a block.
        """
        generator, length = torch.Generator(self.device).manual_seed(CASES.index(scores)), self.model.context_length
        dtype = AUTOCAST_DTYPES.get(self.precision, torch.float32)  # autocast would cast the inputs to this type
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
    """Enable the same attention kernel on every rank. Raises BadInput if no kernel supports the shape."""
    _enable(from_coordinator(ranks, lambda: _choose(shape, determinism, model_json)))


def keep_attention(shape: Shape, before: dict[str, Any], now: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Enable the checkpoint's kernel if this job chose another kernel only because of its own timings.

    Return the numerics of this job, with the enabled kernel.

    Arguments:
        shape: the shape of the run's attention
        before: the numerics that the checkpoint records
        now: the numerics of this job
        ranks: the ranks of the job
    """
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
    # torch.compile's disk caches ignore these switches. Without the tag, they could return a graph with another kernel.
    torch.compiler.config.cache_key_tag = f"attention {name}"
    torch.cuda.empty_cache()  # the memory of the tests would fragment the memory of the run


def problem_of(name: str, shape: Shape) -> str | None:
    """Compare a kernel's outputs and gradients with unfused attention. Return the problem, or None if there is none."""
    return _in_memory(shape.microbatch_size, partial(_problem, name, shape))


def fastest(names: list[str], shape: Shape) -> str:
    """Return the fastest kernel for a forward and a backward pass.

    A kernel that comes later in `names` is chosen only if it is faster by FASTER_SHARE.
    """
    fastest_name, least_seconds = names[0], math.inf
    sequences = min(shape.microbatch_size, TIMED_SEQUENCES)
    for name in names if len(names) > 1 else []:
        seconds = _in_memory(sequences, partial(seconds_of, name, shape))
        if seconds < (1 - FASTER_SHARE) * least_seconds:
            fastest_name, least_seconds = name, seconds
    return fastest_name


def seconds_of(name: str, shape: Shape, sequences: int) -> float:
    """Return the seconds that a forward and a backward pass take: the minimum of several timings."""
    inputs, timings = shape.random_inputs(sequences), []
    gradient = _random_gradient(inputs)
    for _ in range(ROUNDS):
        start_time = time.perf_counter()
        _run(KERNELS[name], inputs, gradient, shape.model.drop_rate)
        if shape.device.type == "cuda":
            torch.cuda.synchronize(shape.device)
        timings.append(time.perf_counter() - start_time)
    return min(timings)


def formula(inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Return the causal attention of fp32 queries, keys and values (N, T, D), and their gradients.

    To save memory, only some rows are computed at a time.
    """
    queries, keys, values = leaves = [part.detach().requires_grad_() for part in inputs]
    outputs, length, scale = [], queries.shape[1], 1 / math.sqrt(queries.shape[2])
    rows = max(1, SCORES_AT_ONCE // (len(queries) * length))
    for first in range(0, length, rows):
        # No query in these rows attends to a key after them, so later keys are left out.
        query_rows, key_rows = slice(first, first + rows), slice(0, first + rows)
        scores = scale * queries[:, query_rows] @ keys[:, key_rows].mT
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(first + 1)
        outputs.append(scores.masked_fill(later, -math.inf).softmax(-1) @ values[:, key_rows])
        outputs[-1].backward(gradient[:, query_rows])
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
    """Return what `work` returns for this number of sequences or, if they do not fit in memory, for fewer sequences.

    The memory error is raised if not even one sequence fits.
    """
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
            difference = _difference(KERNELS[name], inputs, gradient, scores)
            if shape.model.drop_rate > 0:
                _run(KERNELS[name], inputs, gradient, shape.model.drop_rate)
        except RuntimeError as error:  # torch reports that no kernel is available
            if is_memory_error(error):
                raise
            return str(error).partition("\n")[0].rstrip(".")
        if not difference <= TOLERANCE:  # NaN is a problem, too
            return f"differs from unfused attention by {difference:.2g} of the largest value"
    return None


def _difference(backend: SDPBackend, inputs: list[Tensor], gradient: Tensor, scores: ScoreCase) -> float:
    """Compare a kernel's outputs and gradients with unfused attention in a sample of heads.

    Return the largest deviation, relative to the largest reference value; NaN if any output or
    gradient is not finite.
    """
    tensors = _run(backend, inputs, gradient)
    with torch.no_grad():
        tensors.append(_attend(backend, inputs, 0.0))  # without gradients, as in validation
    # Begin with one difference per tensor: 0, or NaN if the tensor is not finite.
    differences = [0.0 * torch.linalg.vector_norm(part, math.inf, dtype=torch.float32) for part in tensors]
    batch, heads, length, width = inputs[0].shape
    gradients = gradient.unflatten(2, (heads, width)).transpose(1, 2)
    smallest_scales = (1.0, scores.deviation, scores.deviation, 1.0, 1.0)
    # If scores are shifted, the first channel of queries and keys holds the shift, and the gradients of this channel
    # are only rounding errors.
    channels = slice(1 if scores.shift else 0, None)
    pairs = torch.linspace(0, batch * heads - 1, min(batch * heads, max(2, COMPARED_SCORES // length**2))).long()
    for some_pairs in pairs.split(max(1, SCORES_AT_ONCE // length**2)):
        indices = (some_pairs // heads, some_pairs % heads)
        references = formula([part[indices].float() for part in inputs], gradients[indices].float())
        for part, reference, floor in zip(tensors, [*references, references[0]], smallest_scales, strict=True):
            difference = (part[indices] - reference)[..., channels].abs().max()
            differences.append(difference / reference[..., channels].abs().max().clamp(min=floor))
    return torch.stack(differences).max().item()  # torch's maximum is NaN if any difference is NaN


def _random_gradient(inputs: list[Tensor]) -> Tensor:
    """Return a random gradient of the concatenated outputs of the heads, (B, T, C).

    It has the shape and layout of the gradient that the backward pass of the output matrix would compute.
    """
    batch, heads, length, width = inputs[0].shape
    generator = torch.Generator(inputs[0].device).manual_seed(0)
    size = (batch, length, heads * width)
    return torch.randn(size, generator=generator, device=inputs[0].device, dtype=inputs[0].dtype)


def _run(backend: SDPBackend, inputs: list[Tensor], gradient: Tensor, drop_rate: float = 0.0) -> list[Tensor]:
    """Return the output, and the gradients of the queries, keys and values, (B, H, T, D) each."""
    leaves = [part.detach().requires_grad_() for part in inputs]
    output = _attend(backend, leaves, drop_rate)
    gradients = torch.autograd.grad(output.transpose(1, 2).flatten(2), leaves, gradient)
    return [output.detach(), *gradients]


def _attend(backend: SDPBackend, inputs: list[Tensor], drop_rate: float) -> Tensor:
    with sdpa_kernel(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about each kernel that it rejects
        queries, keys, values = inputs
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=drop_rate)
