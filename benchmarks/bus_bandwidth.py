"""Bus bandwidth of collectives: all-reduce, all-gather and reduce-scatter of bf16 by plain torch.distributed.

torchrun --standalone --nproc_per_node=8 benchmarks/bus_bandwidth.py [--mebibytes 1 16 256 1024]

Bus bandwidth is S / t x 2 (n - 1) / n for an all-reduce, S / t x (n - 1) / n for the others, with S the bytes of the
larger buffer, n the ranks, t the seconds of a call: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md. It can be
compared with the link's bandwidth in one direction, whatever the number of ranks. NCCL on GPUs, gloo on a CPU.
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
TRANSFERS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}  # times (n - 1) / n of the buffer


def main(*, mebibytes: tuple[int, ...] = (1, 16, 64, 256, 1024)) -> None:
    """Print the table on rank 0.

    Args:
        mebibytes: sizes of the larger buffer.
    """
    ranks = start(None, bench.GROUP_SECONDS)
    if ranks.world_size == 1:
        raise BadInput("got one rank, wanted several: python -m torch.distributed.run --nproc_per_node=2 or more")
    columns = [f"MiB, {ranks.world_size} ranks", *(f"{name} GB/s" for name in TRANSFERS), "all-reduce ms"]
    rows = []
    for size in mebibytes:
        seconds = [_seconds(ranks, call) for call in _collectives(ranks, size << 20)]
        timed = zip(TRANSFERS, seconds, strict=True)
        speeds = [bus_bandwidth(name, size << 20, each, ranks.world_size) for name, each in timed]
        rows.append([f"{size:,}", *(f"{speed / 1e9:.1f}" for speed in speeds), f"{1e3 * seconds[0]:.3f}"])
        if ranks.coordinates:
            print(" | ".join(rows[-1]), flush=True)
    if ranks.coordinates:
        print(f"\n{bench.table(columns, rows)}", flush=True)
    stop()


def bus_bandwidth(collective: str, size_bytes: int, seconds: float, world_size: int) -> float:
    """Return bytes a second that each rank's link carries in one direction."""
    return size_bytes / seconds * TRANSFERS[collective] * (world_size - 1) / world_size


def _collectives(ranks: Ranks, size_bytes: int) -> list[Callable[[], object]]:
    """Return the collectives in the order of TRANSFERS."""
    part = torch.zeros(size_bytes // 2 // ranks.world_size, dtype=torch.bfloat16, device=ranks.device)
    whole = part.repeat(ranks.world_size)
    return [
        lambda: dist.all_reduce(whole),
        lambda: all_gather_single(whole, part),
        lambda: reduce_scatter_single(part, whole),
    ]


def _seconds(ranks: Ranks, call: Callable[[], object]) -> float:
    """Return the seconds of a call: the median over rounds of calls that follow each other at once."""
    synchronize = torch.cuda.synchronize if ranks.device.type == "cuda" else lambda: None
    seconds = []
    for _ in range(1 + ROUNDS):  # the first one connects
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
