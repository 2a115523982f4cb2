"""Script: a trial of the batch-size search; its steps allocate what each argument says, torch=GIB or library=GIB."""

import ctypes
import sys
from types import SimpleNamespace

import torch

from training.batch_finder import probe
from training.hardware.usable_gpus import use_gpu


def allocate(*_: object) -> None:
    """Allocate in order: `torch` for a moment, `library` for good, as cuBLAS or NCCL do at their first use."""
    driver = ctypes.CDLL("libcuda.so.1")
    for word in sys.argv[1:]:
        owner, _, gib = word.partition("=")
        size = int(float(gib) * (1 << 30))
        if owner == "torch":
            torch.empty(size, dtype=torch.uint8, device="cuda")
        else:
            driver.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(size))


DEVICE = torch.device("cuda", 0)
use_gpu(DEVICE)
probe.take_steps = allocate
state = SimpleNamespace(parallel=SimpleNamespace(network=torch.nn.Linear(1, 1)))
try:
    print(probe._measure(state, None, SimpleNamespace(device=DEVICE), None))
except torch.OutOfMemoryError as error:
    print(error)
