"""Determinism levels, and the switches of torch, cuBLAS and malloc that each one needs.

off       fastest kernels and reductions, reproducible to rounding
run       bit-identical on the same world size and wrapper
elastic   bit-identical on any world size, under DDP or FSDP, resumed or not
"""

import ctypes
import os
import sys

import torch

from training.config.train_config import TrainConfig
from training.parallel.process_group import Ranks

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
KEPT_BYTES, MAPPED_BYTES = (1 << 31) - 1, (1 << 30, 1 << 25)  # the most that versions of glibc take


def resolve_determinism(train: TrainConfig, device: torch.device) -> str:
    """Return "off", "run" or "elastic"."""
    return train.execution.determinism or ("off" if device.type == "cuda" else "elastic")


def set_determinism(level: str, cpu_threads: int, ranks: Ranks) -> None:
    """Set the process-wide switches of a level. Call it before the first kernel runs."""
    if ranks.device.type == "cpu":
        torch.set_num_threads(cpu_threads)
        _keep_freed_memory()
    if level != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # NaN in every buffer
        torch.backends.cudnn.benchmark = False
        # It has no deterministic backward: strict mode skips it anyway, and the fingerprint is to say so.
        torch.backends.cuda.enable_cudnn_sdp(False)


def _keep_freed_memory() -> None:
    """Make glibc, where it is glibc, keep freed memory for the next step (docs/NOTES.md, new pages)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for threshold in MAPPED_BYTES:  # smaller blocks come from the heap,
            if mallopt(M_MMAP_THRESHOLD, threshold):
                mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)  # whose free end returns to the system only beyond this
                break
