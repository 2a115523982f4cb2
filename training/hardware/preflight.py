"""Checks of this machine before a run costs anything: GPUs that CUDA can use, a C compiler for torch.compile."""

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import torch

from common.errors import BadInput

NVML = "libnvidia-ml.so.1"  # part of the driver
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU of the kernel's driver
NO_GPUS = ("", "-1", "none", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs


def choose_device(wanted: str | None) -> str:
    """Return "cuda" or "cpu": what is wanted, else cuda where there are GPUs.

    Raises BadInput where the driver has GPUs that torch cannot use, unless "cpu" is wanted: on the CPU of a rented GPU
    machine a run would cost as much and take weeks.
    """
    if wanted == "cpu":
        return wanted
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.accelerator.device_count() if torch.cuda.is_available() else 0
    visible, there = os.environ.get("CUDA_VISIBLE_DEVICES"), driver_gpus()
    if visible is not None:
        there = 0 if visible.strip() in NO_GPUS else min(there, 1)
    if usable < there:
        raise BadInput(_unusable(usable, there, " ".join(str(warning.message) for warning in caught)))
    return wanted or ("cuda" if usable else "cpu")


def driver_gpus() -> int:
    """Return how many GPUs the NVIDIA driver has, whether torch can use them or not; 0 without a driver."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return 0
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        return count.value
    return len(list(DRIVER_GPUS.glob("*")))  # as where the library was updated and the kernel's module was not


def check_compiler() -> None:
    """Raise BadInput where torch.compile would fail at the first step: Triton compiles C code that needs Python.h."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    problem = "gcc is not found"
    if compiler is not None:
        scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does
        headers = sysconfig.get_paths(scheme=scheme)["include"]
        command = [*compiler.split(), "-fsyntax-only", f"-I{headers}", "-xc", "-"]
        program = "#include <stdlib.h>\n#include <Python.h>\n"
        try:
            done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
        except OSError as error:
            problem = f"{compiler}: {error.strerror}"
        else:
            if done.returncode == 0:
                return
            problem = next((line for line in done.stderr.splitlines() if "error" in line), f"{compiler} fails")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise BadInput(
        f"torch.compile needs a C compiler and Python's headers: {problem}; run: sudo apt-get install build-essential "
        f"python{version}-dev; or train more slowly with --set compile=false"
    )


def _unusable(usable: int, there: int, warning: str) -> str:
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
