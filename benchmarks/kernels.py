"""Kernel profile of a training step: time by kind, beside the roofline of training/planning/throughput.py."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # missing from its __all__
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from model.config import ModelConfig  # after the path to it
from training.hardware.gpus import Gpu, named_gpus
from training.planning.memory_model import gpu_bytes
from training.planning.throughput import seconds_per_token

# By name of the CUDA kernel, or of the ATen operation on a CPU; the first match counts, attention before matmul: its
# kernels have both in their names. Compiled kernels are elementwise or the loss, and name their neighbours, too.
KINDS = {
    "communication": r"nccl|c10d|gloo",
    "attention": r"flash|fmha|attention|sdpa",
    "optimizer": r"adam|foreach|multi_tensor|addcdiv|addcmul|lerp",
    "loss": r"softmax|nll_loss|cross_entropy",
    "matmul": r"gemm|gemv|cutlass|cublas|nvjet|xmma|aten::(addmm|mm|bmm|linear|matmul)|mkldnn_",
}
OTHER = "elementwise"  # and copies


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    kinds = ["loss"] if kernel.startswith("triton_") else list(KINDS)
    return next((kind for kind in kinds if re.search(KINDS[kind], kernel.lower())), OTHER)


def kernel_seconds(step: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of a step by kind: of kernels on a GPU, else of operations on the CPU."""
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    seconds: Counter[str] = Counter()
    for event in profiler.key_averages():
        # not the spans of the host, such as "Optimizer.step": their kernels are there as well
        if cuda and event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            seconds[kind_of(event.key)] += event.self_device_time_total / 1e6
        elif not cuda:
            seconds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    return dict(seconds)


def table(seconds: dict[str, float], config: ModelConfig, gpu: Gpu | None) -> list[str]:
    """Format a table: milliseconds per step, shares, and the roofline's shares if the GPU is known."""
    if not seconds:
        return ["kernels: none were recorded; the profiler may lack permission on this machine (CUPTI)"]
    ideal = {} if gpu is None else seconds_per_token(config, gpu)
    lines = [f"{'kernels':16}{'ms a step':>12}{'share':>8}{'roofline':>10}"]
    for kind in sorted({*seconds, *ideal}, key=lambda kind: -seconds.get(kind, 0.0)):
        share = seconds.get(kind, 0.0) / sum(seconds.values())
        wanted = f"{ideal[kind] / sum(ideal.values()):.1%}" if kind in ideal else "-"
        lines.append(f"{kind:16}{1000 * seconds.get(kind, 0.0):>12,.1f}{share:>8.1%}{wanted:>10}")
    return lines


def gpu_here(device: str, memory_bytes: int | None) -> Gpu | None:
    """Return the known GPU of this torch device name, nearest in memory, or None."""
    return min(named_gpus(device), key=lambda gpu: abs(gpu_bytes(gpu) - (memory_bytes or 0)), default=None)
