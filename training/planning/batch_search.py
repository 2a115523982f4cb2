"""Candidates of a search for the largest micro-batch, the next one to try, and a table of predictions without a GPU."""

import math

import attrs
from tabulate import tabulate

from common.text import printable
from model.config import ModelConfig
from training.config.batch_plan import derive_layout, microbatch_sizes
from training.config.key_groups import BatchOptions
from training.config.train_config import TrainConfig
from training.hardware.gpus import Gpu
from training.planning.memory_model import CALIBRATION, GIB, MemoryModel, gpu_bytes

LARGEST = 4096  # sequences; of candidates without a global batch to keep
FINENESS = 32  # their neighbors differ by 1/32 at most, or by 1


def next_candidate(sizes: list[int], fits: int, fails: float, guess: int | None) -> int | None:
    """Return the next of ascending candidates to try; None when all is known.

    It is the guess while that is undecided; then steps of 1, 2, 4 ... candidates beyond it while all has fit; else the
    one half-way. `fits`, `fails`: the largest known to fit, 0 before; the smallest known not to, infinite before.
    """
    undecided = [size for size in sizes if fits < size < fails]
    if not undecided:
        return None
    near = max((size for size in sizes if size <= (guess or 1)), default=0)
    if near in undecided:
        return near
    if fails == math.inf:
        passed = sum(near < size <= fits for size in sizes)
        return undecided[min(passed, len(undecided) - 1)]
    return undecided[len(undecided) // 2]


def check_world_size(train: TrainConfig, world_size: int) -> None:
    """Raise BadInput when no micro-batch spreads the run's global batch over so many ranks."""
    finest = train.replace(microbatch_size=1, gradient_accumulation_steps=None)
    derive_layout(finest, 1, world_size)  # at whatever context length


def candidates(train: TrainConfig, world_size: int) -> list[int]:
    """Return the micro-batches that keep the global batch; without one, all sizes, thinned out. Raises BadInput."""
    check_world_size(train, world_size)
    if train.batch.global_batch_size is not None:
        return microbatch_sizes(train.batch.global_batch_size, world_size // train.execution.tensor_parallel)
    sizes = [1]
    while sizes[-1] < LARGEST:
        sizes.append(sizes[-1] + max(1, sizes[-1] // FINENESS))
    return sizes


def keeping(batch: BatchOptions, ranks: int, largest: int) -> int | None:
    """Return the largest micro-batch up to `largest` that keeps the run's global batch, given or as derived now."""
    derived = batch.microbatch_size * (batch.gradient_accumulation_steps or 1) * ranks
    return max(microbatch_sizes(batch.global_batch_size or derived, ranks, largest), default=None)


def prediction_table(model: ModelConfig, train: TrainConfig, gpus: list[Gpu], world_size: int) -> list[str]:
    """Return the table as lines, with remedies for GPUs that are too small. Raises BadInput for the world size."""
    check_world_size(train, world_size)
    own, size, rows, notes = MemoryModel.of(model, train, world_size), train.batch.microbatch_size, [], []
    for gpu in gpus:
        name, usable = printable(gpu.name), gpu_bytes(gpu)
        for kind in ("ddp", own.parallel if own.sharded else "fsdp") if own.data_parallel > 1 else ("ddp",):
            memory = attrs.evolve(own, parallel=kind)
            largest = memory.largest_microbatch(usable)
            peak = f"{memory.predict(size).total / GIB:.2f} GiB"
            keeps = keeping(train.batch, own.data_parallel, largest or 0) or "none"
            rows.append([name, f"{usable / GIB:.1f}", kind, peak, f"{largest or 'none'}", f"{keeps}"])
            if largest is None:
                notes.append(f"{name}, {kind}: not even one sequence fits; {memory.remedies(usable)}")
    if train.execution.precision == "fp32" or train.execution.compile is False:
        notes.append(f"{train.file}: precision fp32 and compile false take more than predicted here")
    parts = own.predict(size).parts.items()
    unit, unit_name = (GIB, "GiB") if own.predict(size).allocated >= GIB else (1 << 20, "MiB")
    listed = ", ".join(f"{name} {size_bytes / unit:.2f}" for name, size_bytes in parts)
    heads = ["GPU", "GiB", "parallel", f"peak at {size}", "largest", "keeps the global batch"]
    columns = ("left", "right", "left", "right", "right", "left")
    return [
        f"{train.file.parent}: on each of {world_size} ranks, at micro-batch {size}, {own.parallel}, "
        f"{unit_name}: {listed}",
        *tabulate(rows, heads, tablefmt="plain", disable_numparse=True, colalign=columns).splitlines(),
        *notes,
        f"{CALIBRATION}; bf16, compiled, determinism {own.determinism}, accumulation {own.accumulation_at(size)}",
    ]
