"""Kernel profile of a run's training step: time by kind of kernel, compared with the roofline of the planner.

python benchmarks/kernels.py RUN [KEY=VALUE ...]

RUN is a run directory; its tokens are not read. KEY is a key of its train.json. The script also works under torchrun.
The roofline comes from training/planning/throughput.py.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import bench
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from model.config import ModelConfig
from training.config.train_config import load_run
from training.hardware.gpus import Gpu, named_gpus
from training.parallel.process_group import start, stop
from training.planning.batch_probe import take_steps
from training.planning.memory_model import gpu_bytes
from training.planning.throughput import FITS, seconds_per_token

# Patterns for the name of the CUDA kernel, or of the ATen operation on a CPU. The first match counts. Attention comes
# before matmul, because the names of attention kernels match both patterns. Compiled kernels (triton_...) compute
# elementwise operations or the loss, even if their names also contain the names of neighboring operations.
KINDS = {
    "communication": r"nccl|c10d|gloo",
    "attention": r"flash|fmha|attention|sdpa",
    "optimizer": r"adam|foreach|multi_tensor|addcdiv|addcmul|lerp",
    "loss": r"softmax|nll_loss|cross_entropy",
    "matmul": r"gemm|gemv|cutlass|cublas|nvjet|xmma|aten::(addmm|mm|bmm|linear|matmul)|mkldnn_",
}
OTHER = "elementwise"  # includes copies


def main(directory: Path, /, *overrides: str) -> None:
    """Print the table on rank 0."""
    run = load_run(directory, overrides)
    ranks = start(None, run.train.timeout_seconds)
    state, settings = bench.build(run, ranks)
    take_steps(state, settings, ranks, bench.WARM_UP)
    seconds = kernel_seconds(lambda: take_steps(state, settings, ranks, 1))
    if ranks.coordinates:
        print(table(seconds, run.model, _gpu_here()))
    stop()


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, judged by its name."""
    kinds = ["loss"] if kernel.startswith("triton_") else list(KINDS)
    return next((kind for kind in kinds if re.search(KINDS[kind], kernel.lower())), OTHER)


def kernel_seconds(step: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of a step by kind of kernel on a GPU, or by kind of operation on a CPU."""
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    seconds: Counter[str] = Counter()
    for event in profiler.key_averages():
        # Skip annotations of the host such as "Optimizer.step", because their kernels have separate events.
        if cuda and event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            seconds[kind_of(event.key)] += event.self_device_time_total / 1e6
        elif not cuda:
            seconds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    return dict(seconds)


def table(seconds: dict[str, float], config: ModelConfig, gpu: Gpu | None) -> str:
    """Return a table with a row for each kind: milliseconds per step, share, and share predicted by the roofline."""
    if not seconds:
        return "kernels: none were recorded; the profiler (CUPTI) may not have permission on this machine"
    ideal = {} if gpu is None else seconds_per_token(config, gpu, FITS[gpu.similar_to])
    rows = []
    for kind in sorted({*seconds, *ideal}, key=lambda kind: -seconds.get(kind, 0.0)):
        measured = seconds.get(kind, 0.0)
        ideal_share = f"{ideal[kind] / sum(ideal.values()):.1%}" if kind in ideal else "-"
        rows.append([kind, f"{1000 * measured:,.1f}", f"{measured / sum(seconds.values()):.1%}", ideal_share])
    return bench.table(["kernels", "ms per step", "share", "roofline"], rows)


def _gpu_here() -> Gpu | None:
    """Return the known GPU with this GPU's name and the most similar memory size, or None if the name is unknown."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return min(named_gpus(properties.name), key=lambda gpu: abs(gpu_bytes(gpu) - properties.total_memory), default=None)


if __name__ == "__main__":
    bench.run(main)
