"""Memory outside torch's allocator: CUDA's context, loaded libraries and NCCL's buffers.

python benchmarks/outside_memory.py [RUN] [--ranks 8]

The benchmark trains RUN, without reading its tokens, for a few steps on one rank and on all ranks. It prints the memory
that the driver reports minus the memory that torch's allocator reserves, for the GPU with the largest difference. This
includes the memory of other processes. In training/planning/memory_model.py, CONTEXT_BYTES is the value for one rank,
and NCCL_BYTES is the largest of the other values minus the value for one rank.
"""

import json
from pathlib import Path

import bench
import torch

from common.errors import BadInput
from training.config.train_config import load_run
from training.parallel.process_group import gather, start, stop
from training.planning.batch_probe import take_steps
from training.planning.memory_model import GIB, outside_bytes

STEPS = 3  # training steps before the second measurement, because libraries are loaded and NCCL connects on first use
LAYOUTS = (("ddp", "off"), ("fsdp", "elastic"))  # the second layout uses all kinds of collectives
COLUMNS = ["GiB outside the allocator", "at the start", f"after {STEPS} steps", "predicted"]


def main(
    run: Path = bench.ROOT / "runs" / "8xh100",
    /,
    *,
    ranks: int | None = None,
    set: tuple[str, ...] = (),
    as_json: bool = False,
) -> None:
    """Print the table.

    Args:
        ranks: number of ranks; default: one for each GPU.
        set: KEY=VALUE of train.json; may be repeated.
        as_json: measure in this process, which torchrun has started.
    """
    if not torch.cuda.is_available():
        raise BadInput("this machine has no GPU, which this benchmark needs")
    if as_json:
        measure(run, set)
        return
    count = ranks or torch.cuda.device_count()
    rows = []
    for size, (parallel, level) in [(1, LAYOUTS[0]), *((count, layout) for layout in LAYOUTS if count > 1)]:
        settings = (f"parallel={parallel}", f"determinism={level}", *set)
        cells = (*_in_processes(run, size, settings), outside_bytes(size))
        rows.append([f"ranks {size}, {parallel}, {level}", *(f"{cell / GIB:.3f}" for cell in cells)])
        print(" | ".join(rows[-1]), flush=True)
    print(f"\n{bench.table(COLUMNS, rows)}", flush=True)


def measure(directory: Path, settings: tuple[str, ...]) -> None:
    """Print the bytes outside the allocator, at the start and after the steps, each as the maximum over the ranks."""
    run = load_run(directory, settings)
    ranks = start("cuda", run.train.timeout_seconds)
    at_start = _outside()
    state, step_settings = bench.build(run, ranks)
    take_steps(state, step_settings, ranks, STEPS)
    measurements = gather(ranks, (at_start, _outside()))
    if ranks.coordinates:
        print(json.dumps([max(column) for column in zip(*measurements, strict=True)]), flush=True)
    stop()


def _outside() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _in_processes(run: Path, ranks: int, settings: tuple[str, ...]) -> list[int]:
    printed = bench.output_of(ranks, __file__, str(run), "--as-json", "--set", *settings)
    return list(json.loads(printed.splitlines()[-1]))


if __name__ == "__main__":
    bench.run(main)
