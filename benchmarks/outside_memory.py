"""Memory outside torch's allocator: CUDA's context, loaded libraries, NCCL's buffers.

python benchmarks/outside_memory.py [RUN] [--ranks 8]

Trains RUN, whose tokens are not read, for some steps on one rank and on all, and prints what the driver counts less
what torch's allocator holds, of the GPU where that is most. Memory of other processes counts as well. The row of one
rank replaces CONTEXT_BYTES of training/planning/memory_model.py, the largest of the others less it NCCL_BYTES.
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

STEPS = 3  # of training: libraries load, and NCCL connects, with their first use
LAYOUTS = (("ddp", "off"), ("fsdp", "elastic"))  # the second one has collectives of every kind
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
        ranks: default: one for each GPU.
        set: KEY=VALUE of train.json; may be repeated.
        as_json: measure in this process, one of torchrun's.
    """
    if not torch.cuda.is_available():
        raise BadInput("no GPU here")
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
    """Print the bytes at the start and after the steps, the largest of all ranks."""
    run = load_run(directory, settings)
    ranks = start("cuda", run.train.timeout_seconds)
    at_start = _outside()
    state, step_settings = bench.build(run, ranks)
    take_steps(state, step_settings, ranks, STEPS)
    found = gather(ranks, (at_start, _outside()))
    if ranks.coordinates:
        print(json.dumps([max(each) for each in zip(*found, strict=True)]), flush=True)
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
