"""What this run runs on: names for the record, peak arithmetic for MFU, memory in use."""

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

from training.ranks import Ranks

# Dense bf16 FLOP/s by a part of torch.cuda.get_device_name(), first match wins; vendors' datasheets, without sparsity.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A40": 149.7e12,
    "A6000": 154.8e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 3090 Ti": 80e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165.2e12,
    "RTX 5090": 209.5e12,
}

_PACKAGES = ("torch", "numpy", "safetensors", "tiktoken", "attrs", "jaxtyping", "matplotlib", "tqdm")


def peak_flops(ranks: Ranks) -> float | None:
    """Return the dense bf16 peak of one rank's GPU, or None where it is not known: no MFU is better than a guess."""
    if ranks.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(ranks.device)
    return known_peak_flops(name)


def known_peak_flops(gpu: str) -> float | None:
    """Return the dense bf16 peak of a GPU by its name, or None."""
    words = (rf"\b{part}\b(?!.*Laptop)" for part in _PEAK_FLOPS)
    return next((peak for word, peak in zip(words, _PEAK_FLOPS.values(), strict=True) if re.search(word, gpu)), None)


def peak_memory_bytes(ranks: Ranks) -> int:
    """Return the most memory this rank has held: of the GPU's allocator, or of the process on a CPU."""
    if ranks.device.type == "cuda":
        return torch.cuda.max_memory_allocated(ranks.device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def environment(ranks: Ranks) -> dict[str, Any]:
    """Return package versions and hardware for the record."""
    cuda = ranks.device.type == "cuda"
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(ranks.device) if cuda else cpu_name(),
        "cuda": torch.version.cuda if cuda else None,
        "world_size": ranks.world_size,
        "threads": torch.get_num_threads(),
    }


def cpu_name() -> str:
    """Return the processor's model name, or its architecture where the system does not tell."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


@functools.cache
def git_commit() -> str | None:
    """Return the commit this code is at, with "-dirty" when tracked files differ from it, or None outside git."""
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
