"""FLOP/s of a large matrix product on this device: what training can come near to, unlike the datasheet's peak."""

import statistics
import time
from typing import Literal

import torch

SIDES = {"cuda": 8192, "cpu": 1024}
SECONDS = 2.0  # long enough for a GPU to come down to the clock that it holds


def matmul_flops(device: Literal["cuda", "cpu"], precision: str, threads: int) -> float:
    """Return the FLOP/s of a square product of random matrices, bf16 on a GPU, the run's precision on a CPU."""
    torch.set_num_threads(threads)
    side = SIDES[device]
    dtype = torch.float32 if precision == "fp32" and device == "cpu" else torch.bfloat16
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds: list[float] = []
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    del left, right
    torch.cuda.empty_cache()  # runs that follow need the GPU's memory
    return float(2 * side**3 / statistics.median(seconds))
