"""Search for the largest micro-batch: the candidates, their order, and a table of predictions without a GPU."""

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

LARGEST = 4096  # sequences in the largest candidate, if train.json sets no global batch
FINENESS = 32  # without a global batch, neighboring candidates differ by at most 1/32, or by 1


def next_candidate(sizes: list[int], fits: int, fails: float, guess: int | None) -> int | None:
    """Return the next candidate to try, or None if the largest size that fits is known.

    `sizes` are all candidates in ascending order. `fits` is the largest size that has fitted so far, or 0 if there is
    none. `fails` is the smallest size that has not fitted, or infinity. `guess` is tried first. While everything fits,
    the next candidates are 1, 2, 4 ... places above `fits`. After a failure, the next candidate is halfway between
    `fits` and `fails`.
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
    """Raise BadInput if no micro-batch size allows the global batch to be distributed over this number of ranks."""
    finest = train.replace(microbatch_size=1, gradient_accumulation_steps=None)
    derive_layout(finest, 1, world_size)  # the context length does not matter


def candidates(train: TrainConfig, world_size: int) -> list[int]:
    """Return the micro-batch sizes that do not change the global batch, in ascending order.

    If train.json sets no global batch, all sizes up to LARGEST are possible, and a selection of them is returned.
    Raises BadInput if the global batch cannot be distributed.
    """
    check_world_size(train, world_size)
    if train.batch.global_batch_size is not None:
        return microbatch_sizes(train.batch.global_batch_size, world_size // train.execution.tensor_parallel)
    sizes = [1]
    while sizes[-1] < LARGEST:
        sizes.append(sizes[-1] + max(1, sizes[-1] // FINENESS))
    return sizes


def largest_unchanged(batch: BatchOptions, ranks: int, largest: int) -> int | None:
    """Return the largest micro-batch, up to `largest`, that does not change the run's global batch.

    If `global_batch_size` is not set, the global batch follows from the current settings. Return None if there is no
    such micro-batch.
    """
    derived = batch.microbatch_size * (batch.gradient_accumulation_steps or 1) * ranks
    return max(microbatch_sizes(batch.global_batch_size or derived, ranks, largest), default=None)


def prediction_table(model: ModelConfig, train: TrainConfig, gpus: list[Gpu], world_size: int) -> list[str]:
    """Return a table of predictions as lines, with remedies for GPUs that are too small.

    Raises BadInput if the global batch cannot be distributed over the world size.
    """
    check_world_size(train, world_size)
    run_memory, size, rows, notes = MemoryModel.of(model, train, world_size), train.batch.microbatch_size, [], []
    kinds = ["ddp"]
    if run_memory.data_parallel > 1:
        kinds.append(run_memory.parallel if run_memory.sharded else "fsdp")
    for gpu in gpus:
        name, usable = printable(gpu.name), gpu_bytes(gpu)
        for kind in kinds:
            memory = attrs.evolve(run_memory, parallel=kind)
            largest = memory.largest_microbatch(usable)
            peak = f"{memory.predict(size).total / GIB:.2f} GiB"
            unchanged = largest_unchanged(train.batch, run_memory.data_parallel, largest or 0) or "none"
            rows.append([name, f"{usable / GIB:.1f}", kind, peak, f"{largest or 'none'}", f"{unchanged}"])
            if largest is None:
                notes.append(f"{name}, {kind}: not even one sequence fits; {memory.remedies(usable)}")
    if train.execution.precision == "fp32" or train.execution.compile is False:
        notes.append(f"{train.file}: with precision fp32 or compile false, a run needs more memory than predicted here")
    prediction = run_memory.predict(size)
    unit, unit_name = (GIB, "GiB") if prediction.allocated >= GIB else (1 << 20, "MiB")
    parts = ", ".join(f"{name} {part_bytes / unit:.2f}" for name, part_bytes in prediction.parts.items())
    headings = ["GPU", "GiB", "parallel", f"peak at {size}", "largest", "keeps the global batch"]
    columns = ("left", "right", "left", "right", "right", "left")
    assumptions = f"determinism {run_memory.determinism}, accumulation {run_memory.accumulation_at(size)}"
    return [
        f"{train.file.parent}: {unit_name} on each of {world_size} ranks, with {run_memory.parallel} at micro-batch "
        f"{size}: {parts}",
        *tabulate(rows, headings, tablefmt="plain", disable_numparse=True, colalign=columns).splitlines(),
        *notes,
        f"{CALIBRATION}; bf16, compiled, {assumptions}",
    ]
