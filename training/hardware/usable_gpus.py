"""Usable GPUs: the device of a run, a trial of one GPU, and errors of its memory, or of a CPU's."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.errors import BadInput
from common.launch import environment_rank, environment_world_size, setting
from common.text import either
from training.hardware.driver import driver_gpus

if TYPE_CHECKING:
    from training.config.train_config import Run, TrainConfig

NO_GPUS = ("", "-1", "none", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs
# What plain RuntimeErrors of torch say when memory is missing; only torch's own allocator for CUDA has a type of error.
CPU_WORDS = ("can't allocate memory",)
# CUDA and NCCL; cuBLAS; cuBLAS and cuDNN without memory for a handle; cuDNN 9; torch on a slice of a GPU (MIG), where
# NVML does not tell it whose the memory is (pytorch issue 112377).
GPU_WORDS = ("out of memory", "ALLOC_FAILED", "STATUS_NOT_INITIALIZED", "ALLOCATION_FAILED", "NVML_SUCCESS == ")


def choose_device(wanted: str | None) -> str:
    """Return "cuda" or "cpu": what is wanted, else cuda where there are GPUs.

    Raises BadInput where the driver has GPUs that torch cannot use, unless "cpu" is wanted: on the CPU of a rented GPU
    machine a run would cost as much and take weeks.
    """
    if wanted == "cpu":
        return wanted
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Not device_count(): until CUDA has started, it counts the driver's GPUs by NVML.
        usable = torch._C._cuda_getDeviceCount() if torch.cuda.is_available() else 0
    visible, there = os.environ.get("CUDA_VISIBLE_DEVICES"), driver_gpus()
    if visible is not None:
        there = 0 if visible.strip() in NO_GPUS else min(there, 1)
    if usable < there:
        raise BadInput(_unusable(usable, there, " ".join(str(warning.message) for warning in caught)))
    return wanted or ("cuda" if usable else "cpu")


def use_gpu(device: torch.device) -> None:
    """Make a GPU this process's own and launch a kernel on it. Raises BadInput, for this rank alone."""
    try:
        torch.cuda.set_device(device)
        torch.ones(8, device=device).sum().item()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].removesuffix(".")
        raise BadInput(
            f"GPU {device.index} cannot be used: {reason}; see nvidia-smi; to train on the others, set "
            "CUDA_VISIBLE_DEVICES",
            alone=True,
        ) from error


def is_memory_error(error: Exception) -> bool:
    return is_gpu_memory_error(error) or isinstance(error, MemoryError) or _torch_says(error, CPU_WORDS)


def is_gpu_memory_error(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _torch_says(error, GPU_WORDS)


@contextmanager
def memory_advice(run: "Run") -> Iterator[None]:
    """Raise an error of memory as BadInput of this rank alone, with the user's remedies in this run."""
    try:
        yield
    except Exception as error:
        if not is_memory_error(error):
            raise
        problem = describe_memory_error(error, run.train, run.directory, environment_world_size())
        line = f"rank {environment_rank()}: {problem}"
        raise BadInput(line, alone=True, reason="out-of-memory") from error


def describe_memory_error(error: Exception, train: "TrainConfig", run: Path, ranks: int) -> str:
    """Return a memory error as one line, with a remedy that this run does not use yet. `ranks`: the world size."""
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
    return f"{'the GPU' if gpu else 'this machine'}'s memory does not hold microbatch_size {size}; {advice}"


def _unusable(usable: int, there: int, warning: str) -> str:
    """Return why GPUs cannot be used. `warning`: torch's, which says only in words that the driver is too old."""
    reason = warning.removeprefix("CUDA initialization: ").partition(". ")[0].partition(" (Triggered")[0]
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA; install the one of requirements.txt"
    elif "too old" in warning:
        reason += (
            f", and torch {torch.__version__} is built for CUDA {torch.version.cuda}; update the driver, or install a "
            "torch for its CUDA"
        )
    elif usable:
        reason = "see nvidia-smi; to train on those, set CUDA_VISIBLE_DEVICES"
    return (
        f"the NVIDIA driver has {there} GPU{'s' * (there > 1)}, CUDA can use {usable or 'none'}: "
        f"{reason or 'see nvidia-smi'}; --device cpu uses the CPU"
    )


def _torch_says(error: Exception, words: tuple[str, ...]) -> bool:
    """Tell whether an error of torch contains one of these words: it has no field that says what happened."""
    return isinstance(error, RuntimeError) and any(each in str(error) for each in words)
