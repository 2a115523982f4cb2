"""The bus bandwidth of collectives: all-reduce, all-gather and reduce-scatter of bf16 data, with torch.distributed.

torchrun --standalone --nproc_per_node=8 benchmarks/bus_bandwidth.py [--mebibytes 1 16 256 1024]

The bus bandwidth is S / t x 2 (n - 1) / n for an all-reduce and S / t x (n - 1) / n for the other two, where S is the
size of the larger buffer in bytes, n the number of ranks, and t the seconds of a call (github.com/NVIDIA/nccl-tests,
doc/PERFORMANCE.md). It can be compared with the bandwidth of a link in one direction, whatever the number of ranks.
The backend is NCCL on GPUs and gloo on a CPU.
"""

import statistics
import time
from collections.abc import Callable

import bench
import torch
import torch.distributed as dist

from common.errors import BadInput
from training.parallel.process_group import Ranks, all_gather_single, reduce_scatter_single, start, stop

ROUNDS, CALLS = 5, 10
TRANSFERS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}  # bytes sent, as multiples of (n - 1) / n x S


def main(*, mebibytes: tuple[int, ...] = (1, 16, 64, 256, 1024)) -> None:
    """Print the table on rank 0.

    Args:
        mebibytes: sizes of the larger buffer in MiB.
    """
    ranks = start(None, bench.GROUP_SECONDS)
    if ranks.world_size == 1:
        raise BadInput(
            "needs at least two ranks, but there is only one; start it with "
            "python -m torch.distributed.run --nproc_per_node=2, or with more ranks"
        )
    columns = [f"MiB, {ranks.world_size} ranks", *(f"{name} GB/s" for name in TRANSFERS), "all-reduce ms"]
    rows = []
    for size in mebibytes:
        seconds = [_seconds(ranks, call) for call in _collectives(ranks, size << 20)]
        timings = zip(TRANSFERS, seconds, strict=True)
        speeds = [bus_bandwidth(name, size << 20, call_seconds, ranks.world_size) for name, call_seconds in timings]
        rows.append([f"{size:,}", *(f"{speed / 1e9:.1f}" for speed in speeds), f"{1e3 * seconds[0]:.3f}"])
        if ranks.coordinates:
            print(" | ".join(rows[-1]), flush=True)
    if ranks.coordinates:
        print(f"\n{bench.table(columns, rows)}", flush=True)
    stop()


def bus_bandwidth(collective: str, size_bytes: int, seconds: float, world_size: int) -> float:
    """Return the bytes per second that the link of each rank carries in one direction."""
    return size_bytes / seconds * TRANSFERS[collective] * (world_size - 1) / world_size


def _collectives(ranks: Ranks, size_bytes: int) -> list[Callable[[], object]]:
    """Return the collectives in the order of TRANSFERS."""
    shard = torch.zeros(size_bytes // 2 // ranks.world_size, dtype=torch.bfloat16, device=ranks.device)
    buffer = shard.repeat(ranks.world_size)
    return [
        lambda: dist.all_reduce(buffer),
        lambda: all_gather_single(buffer, shard),
        lambda: reduce_scatter_single(shard, buffer),
    ]


def _seconds(ranks: Ranks, call: Callable[[], object]) -> float:
    """Return the seconds of a call: the median over rounds, each with several calls in a row."""
    synchronize = torch.cuda.synchronize if ranks.device.type == "cuda" else lambda: None
    seconds = []
    for _ in range(1 + ROUNDS):  # the first round connects the ranks and is not measured
        dist.barrier()
        synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        synchronize()
        seconds.append((time.perf_counter() - began) / CALLS)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    bench.run(main)
