"""NVIDIA driver: its GPUs, and the newest CUDA that it supports. Needs no installed package.

python -m training.hardware.driver    compares it with the torch of requirements.txt, before that is downloaded
"""

import ctypes
import sys
from pathlib import Path

from common.errors import EXIT_DONE, EXIT_ERROR
from common.output import Notice, Severity, show

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"  # parts of the driver
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU of the kernel's driver
TORCH_CUDA = "13.0"  # of the torch that requirements.txt names, as the package index has it


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


def driver_cuda() -> str | None:
    """Return the newest CUDA version that the NVIDIA driver supports, such as "13.0"; None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL(CUDA).cuDriverGetVersion(ctypes.byref(version)):
            return None
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def main() -> int:
    """Print an error if the driver is too old; return the exit status. A driver runs all of a major CUDA version."""
    cuda = driver_cuda()
    if cuda is None or int(cuda.partition(".")[0]) >= int(TORCH_CUDA.partition(".")[0]):
        return EXIT_DONE
    line = (
        f"the NVIDIA driver is too old: it supports CUDA {cuda}, the torch of requirements.txt is built for CUDA "
        f"{TORCH_CUDA}; update the driver, or install a torch for its CUDA into .venv"
    )
    show(Notice(line, Severity.ERROR))
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
