"""Kernel profile of a run's training step: time by kind, beside the roofline of training/planning/throughput.py.

python benchmarks/kernels.py RUN [KEY=VALUE ...]

RUN is a run directory, whose tokens are not read; KEY: of its train.json. Works under torchrun.
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

# By name of the CUDA kernel, or of the ATen operation on a CPU; the first match counts, attention before matmul: its
# kernels have both in their names. Compiled kernels are elementwise or the loss, and name their neighbors, too.
KINDS = {
    "communication": r"nccl|c10d|gloo",
    "attention": r"flash|fmha|attention|sdpa",
    "optimizer": r"adam|foreach|multi_tensor|addcdiv|addcmul|lerp",
    "loss": r"softmax|nll_loss|cross_entropy",
    "matmul": r"gemm|gemv|cutlass|cublas|nvjet|xmma|aten::(addmm|mm|bmm|linear|matmul)|mkldnn_",
}
OTHER = "elementwise"  # and copies


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


def table(seconds: dict[str, float], config: ModelConfig, gpu: Gpu | None) -> str:
    """Format a table: milliseconds per step, shares, and the roofline's shares if the GPU is known."""
    if not seconds:
        return "kernels: none were recorded; the profiler may lack permission on this machine (CUPTI)"
    ideal = {} if gpu is None else seconds_per_token(config, gpu, FITS[gpu.similar_to])
    rows = []
    for kind in sorted({*seconds, *ideal}, key=lambda kind: -seconds.get(kind, 0.0)):
        taken = seconds.get(kind, 0.0)
        wanted = f"{ideal[kind] / sum(ideal.values()):.1%}" if kind in ideal else "-"
        rows.append([kind, f"{1000 * taken:,.1f}", f"{taken / sum(seconds.values()):.1%}", wanted])
    return bench.table(["kernels", "ms a step", "share", "roofline"], rows)


def _gpu_here() -> Gpu | None:
    """Return the known GPU of this machine's name that is nearest in memory, or None."""
    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    return min(named_gpus(here.name), key=lambda gpu: abs(gpu_bytes(gpu) - here.total_memory), default=None)


if __name__ == "__main__":
    bench.run(main)
