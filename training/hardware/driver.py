"""The NVIDIA driver: its GPUs, and the newest CUDA version that it supports. This module needs no installed package.

python -m training.hardware.driver    compares the driver with the torch in requirements.txt, before torch is downloaded
"""

import ctypes
import sys
from pathlib import Path

from common.errors import EXIT_DONE, EXIT_ERROR
from common.output import Notice, Severity, show

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"  # libraries of the driver
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # here the kernel module has a folder for each GPU
TORCH_CUDA = "13.0"  # CUDA version of the torch build that pip installs from requirements.txt


def driver_gpus() -> int:
    """Return the number of GPUs that the NVIDIA driver sees, even if torch cannot use them; 0 without a driver."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return 0
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        return count.value
    # NVML can fail although there are GPUs, for example if the driver's library was updated but its kernel module was
    # not. In that case, torch cannot use the GPUs.
    return len(list(DRIVER_GPUS.glob("*")))


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
    """Print an error if the driver is too old, and return the exit status.

    Only major versions are compared, because a driver supports all releases of its major CUDA version.
    """
    cuda = driver_cuda()
    if cuda is None or int(cuda.partition(".")[0]) >= int(TORCH_CUDA.partition(".")[0]):
        return EXIT_DONE
    line = (
        f"the NVIDIA driver is too old: it supports CUDA {cuda}, but the torch in requirements.txt is built for CUDA "
        f"{TORCH_CUDA}; update the driver, or install a torch build for CUDA {cuda} into .venv"
    )
    show(Notice(line, Severity.ERROR))
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
