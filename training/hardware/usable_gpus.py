"""Usable GPUs: choose the device of a run, try a GPU, and explain errors about the memory of a GPU or the machine."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.errors import BadInput
from common.launch import environment_rank, environment_world_size, setting
from common.text import counted, either
from training.hardware.driver import driver_gpus

if TYPE_CHECKING:
    from training.config.train_config import Run, TrainConfig

NO_GPUS = ("", "-1", "none", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs
# If torch's RuntimeError contains one of these phrases, memory is exhausted. Only torch's CUDA allocator has a separate
# error type.
CPU_WORDS = ("can't allocate memory",)
# The sources of these phrases, in order: CUDA and NCCL; cuBLAS; cuBLAS and cuDNN, if no memory is left for a handle;
# cuDNN 9; and torch on a slice of a GPU (MIG), where NVML does not report the memory of each process (pytorch issue
# 112377).
GPU_WORDS = ("out of memory", "ALLOC_FAILED", "STATUS_NOT_INITIALIZED", "ALLOCATION_FAILED", "NVML_SUCCESS == ")


def choose_device(requested: str | None) -> str:
    """Return the requested device, "cuda" or "cpu". Without a request, return "cuda" if a GPU is visible.

    Raises BadInput if the driver has GPUs that torch cannot use, unless "cpu" is requested. Without this error, a run
    on a rented GPU machine would use the CPU: it would cost just as much per hour and take weeks.
    """
    if requested == "cpu":
        return requested
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # device_count() would be wrong here. Until CUDA starts, it asks NVML, which counts all GPUs of the driver.
        usable = torch._C._cuda_getDeviceCount() if torch.cuda.is_available() else 0
    visible, installed = os.environ.get("CUDA_VISIBLE_DEVICES"), driver_gpus()
    if visible is not None:
        installed = 0 if visible.strip() in NO_GPUS else min(installed, 1)
    if usable < installed:
        raise BadInput(_describe_unusable(usable, installed, " ".join(str(warning.message) for warning in caught)))
    return requested or ("cuda" if usable else "cpu")


def too_few_gpus(available: int, ranks: int) -> str:
    """Return the error message for a machine with fewer GPUs than ranks, with advice on how to start the job."""
    problem = f"--device cuda: got {counted(available, 'GPU')} for {counted(ranks, 'rank')} on this machine"
    if available == 0:
        return f"{problem}; pass --device cpu to use the CPU, or leave --device out"
    return f"{problem}; start torchrun with --nproc_per_node={available}"


def use_gpu(device: torch.device) -> None:
    """Select a GPU for this process and launch a kernel on it. If that fails, raises BadInput on this rank only."""
    try:
        torch.cuda.set_device(device)
        torch.ones(8, device=device).sum().item()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].removesuffix(".")
        raise BadInput(
            f"GPU {device.index} cannot be used: {reason}; see nvidia-smi; to train on the other GPUs, set "
            "CUDA_VISIBLE_DEVICES",
            alone=True,
        ) from error


def is_memory_error(error: Exception) -> bool:
    """Return whether an error means that the memory of the GPU or of the machine is exhausted."""
    return is_gpu_memory_error(error) or isinstance(error, MemoryError) or _torch_says(error, CPU_WORDS)


def is_gpu_memory_error(error: Exception) -> bool:
    """Return whether an error means that the memory of the GPU is exhausted."""
    return isinstance(error, torch.OutOfMemoryError) or _torch_says(error, GPU_WORDS)


@contextmanager
def memory_advice(run: "Run") -> Iterator[None]:
    """Turn a memory error into a BadInput on this rank only. The message suggests remedies for this run."""
    try:
        yield
    except Exception as error:
        if not is_memory_error(error):
            raise
        problem = describe_memory_error(error, run.train, run.directory, environment_world_size())
        line = f"rank {environment_rank()}: {problem}"
        raise BadInput(line, alone=True, reason="out-of-memory") from error


def describe_memory_error(error: Exception, train: "TrainConfig", run: Path, ranks: int) -> str:
    """Describe a memory error in one line, with remedies that this run does not use yet. `ranks` is the world size."""
    gpu, size = is_gpu_memory_error(error), train.batch.microbatch_size
    smaller = next((n for n in range(size - 1, 0, -1) if size % n == 0), None)
    advice = f"try {setting(microbatch_size=smaller)}, or find_batch_size.py {run}"
    if smaller is None:
        options = [] if train.memory.recompute_blocks else [setting(recompute_blocks=True)]
        if train.memory.loss_chunks == 1:
            options.append(setting(loss_chunks=8))
        if gpu and ranks > 1 and train.execution.parallel == "ddp" and train.execution.compile != "model":
            options.append(setting(parallel="fsdp"))
        larger = "use a larger GPU" if gpu else "use a larger machine, or a smaller model"
        advice = f"try {either(options)}; or {larger}" if options else larger
    return f"{'the GPU' if gpu else 'this machine'}'s memory is too small for microbatch_size {size}; {advice}"


def _describe_unusable(usable: int, installed: int, warning: str) -> str:
    """Explain why some GPUs cannot be used.

    `warning` is the text of torch's warning. Nothing else shows that the driver is too old.
    """
    reason = warning.removeprefix("CUDA initialization: ").partition(". ")[0].partition(" (Triggered")[0]
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA; install torch as in requirements.txt"
    elif "too old" in warning:
        reason += (
            f", and torch {torch.__version__} is built for CUDA {torch.version.cuda}; update the driver, or install a "
            "torch build for the driver's CUDA version"
        )
    elif usable:
        reason = "see nvidia-smi; to train on the usable GPUs, set CUDA_VISIBLE_DEVICES"
    return (
        f"the NVIDIA driver has {counted(installed, 'GPU')}, but CUDA can use {usable or 'none'}: "
        f"{reason or 'see nvidia-smi'}; --device cpu uses the CPU"
    )


def _torch_says(error: Exception, phrases: tuple[str, ...]) -> bool:
    """Return whether an error of torch contains one of these phrases. The error has no field that states the cause."""
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)
