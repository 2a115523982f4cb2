"""The hardware and software environment of a run: names and versions, peak FLOP/s for MFU, and peak memory."""

import functools
import platform
import re
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "numpy", "safetensors", "tiktoken", "attrs", "jaxtyping", "matplotlib", "tqdm")


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of this rank's GPU in FLOP/s. For an unknown GPU it is None, so no MFU is reported."""
    if device.type != "cuda":
        return None
    from training.hardware.gpus import named_gpus

    return next((gpu.peak_flops for gpu in named_gpus(torch.cuda.get_device_name(device))), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory: the peak of torch's GPU allocator or, on a CPU, the peak of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Return what a run records about its software and hardware."""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "device": device_name(device),
        "cuda": torch.version.cuda if cuda else None,
        "world_size": world_size,
        "threads": torch.get_num_threads(),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Return the processor's model name, or its architecture if the system does not know the name."""
    cpu_file = Path("/proc/cpuinfo")
    text = cpu_file.read_text() if cpu_file.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


@functools.cache
def git_commit() -> str | None:
    """Return the commit of this code, with "-dirty" if tracked files differ from it; None outside a git repository."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
