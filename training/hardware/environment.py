"""Hardware and software environment of a run: names and versions, peak FLOP/s for MFU, peak memory."""

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
    """Return the dense bf16 peak of one rank's GPU in FLOP/s; None for an unknown GPU, for which no MFU is shown."""
    if device.type != "cuda":
        return None
    from training.hardware.gpus import named_gpus

    return next((gpu.peak_flops for gpu in named_gpus(torch.cuda.get_device_name(device))), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory: of the GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
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
    """Return the processor's model name, or its architecture where the system has no name."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


@functools.cache
def git_commit() -> str | None:
    """Return the commit of this code, with "-dirty" when tracked files differ from it; None outside git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
