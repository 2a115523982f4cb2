"""Predicted memory and largest micro-batch of a run, as a table by GPU and wrapper; needs no GPU."""

import attrs
from tabulate import tabulate

from common.errors import printable
from model.config import ModelConfig
from training.batch_finder.search import check_world_size, keeping
from training.config.train_config import TrainConfig
from training.hardware.gpus import Gpu
from training.planning.memory_model import CALIBRATION, GIB, MemoryModel, gpu_bytes


def prediction_table(model: ModelConfig, train: TrainConfig, gpus: list[Gpu], world_size: int) -> list[str]:
    """Return the table as lines, with remedies for GPUs that are too small. Raises BadInput for the world size."""
    check_world_size(train, world_size)
    own, size, rows, notes = MemoryModel.of(model, train, world_size), train.batch.microbatch_size, [], []
    for gpu in gpus:
        name, usable = printable(gpu.name), gpu_bytes(gpu)
        for kind in ("ddp", own.parallel if own.sharded else "fsdp") if world_size > 1 else ("ddp",):
            memory = attrs.evolve(own, parallel=kind)
            largest = memory.largest_microbatch(usable)
            peak = f"{memory.predict(size).total / GIB:.2f} GiB"
            keeps = keeping(train.batch, world_size, largest or 0) or "none"
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
