"""Which kinds of kernels a training step spends its time in, beside the roofline of training/planning/throughput.py."""

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

# By names of CUDA kernels, or of ATen's operations on a CPU; the first that fits counts. Attention's kernels are made
# of matrix products. Compiled ones are elementwise, or the loss, and bear the names of what they stand beside as well.
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
    """Return the lines of a table: milliseconds a step, shares, and the roofline's shares where the GPU has one."""
    if not seconds:
        return ["kernels: none were seen; the profiler may not be allowed on this machine (CUPTI needs permission)"]
    ideal = {} if gpu is None else seconds_per_token(config, gpu)
    lines = [f"{'kernels':16}{'ms a step':>12}{'share':>8}{'roofline':>10}"]
    for kind in sorted({*seconds, *ideal}, key=lambda kind: -seconds.get(kind, 0.0)):
        share = seconds.get(kind, 0.0) / sum(seconds.values())
        wanted = f"{ideal[kind] / sum(ideal.values()):.1%}" if kind in ideal else "-"
        lines.append(f"{kind:16}{1000 * seconds.get(kind, 0.0):>12,.1f}{share:>8.1%}{wanted:>10}")
    return lines


def gpu_here(device: str, memory_bytes: int | None) -> Gpu | None:
    """Return the GPU with this name of torch's and so much memory, or None."""
    return min(named_gpus(device), key=lambda gpu: abs(gpu_bytes(gpu) - (memory_bytes or 0)), default=None)
