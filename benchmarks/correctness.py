"""Correctness on this machine: losses of CPU and GPU, DDP and bare, elastic hashes on all layouts, kill -9 and resume.

python benchmarks/correctness.py losses elastic resume [--ranks 1 2 4 8] [--device cpu]

Trains one small network by train.py on the bytes of Python's library, and prints a line for each comparison; exit
status 1 if one fails. On a CPU the same under gloo.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import attrs
import command
import torch
from small_run import SmallResult, SmallRun

Part = Literal["losses", "elastic", "resume"]
# Largest difference of a step's loss in nats. On a CPU bf16 differs from fp32 by 0.0003 in these steps, and DDP of two
# ranks from one process by 0.0002 in bf16.
FP32_LIMIT, BF16_LIMIT, ORDER_LIMIT = 1e-4, 3e-3, 2e-3
COLUMNS = ["comparison", "found", "limit", "outcome"]


@attrs.frozen
class MachineComparison:
    """One line of the table; `held` is None where values mean nothing, on the emulated driver."""

    what: str
    found: str
    limit: str
    held: bool | None

    @property
    def cells(self) -> list[str]:
        return [self.what, self.found, self.limit, {True: "holds", False: "FAILS", None: "emulated"}[self.held]]


def main(
    *parts: Part,
    ranks: tuple[int, ...] = (),
    device: Literal["cuda", "cpu"] = "cuda",
    steps: int = 20,
    tiny: bool = False,
    emulated: bool = False,
) -> None:
    """Print the tables.

    Args:
        ranks: world sizes; default: 1, 2, 4, 8 as far as there are GPUs, or 1 and 2.
        tiny: a smaller network, not compiled: for a CPU without fast bf16.
        emulated: the values are those of an emulated driver: compare nothing. Tiny.
    """
    gpus = torch.cuda.device_count() if device == "cuda" else 2
    sizes = ranks or tuple(size for size in (1, 2, 4, 8) if size <= gpus)
    failed = False
    with TemporaryDirectory() as folder:
        small = SmallRun(folder=Path(folder), device=device, steps=steps, tiny=tiny or emulated)
        for part in parts or ("losses", "elastic", "resume"):
            compare = {"losses": compare_losses, "elastic": compare_hashes, "resume": compare_resumed}[part]
            rows = []
            for comparison in compare(small, sizes):
                shown = attrs.evolve(comparison, held=None) if emulated else comparison
                print(*shown.cells, sep=" | ", flush=True)
                rows.append(shown)
            failed |= any(row.held is False for row in rows)
            print(f"\n{part}, {small.description}\n{command.table(COLUMNS, [row.cells for row in rows])}\n", flush=True)
    sys.exit(1 if failed else 0)


def compare_losses(small: SmallRun, sizes: Sequence[int]) -> Iterator[MachineComparison]:
    """Compare losses of each step: CPU and GPU in fp32 and bf16; one process and DDP."""
    wanted = small.train("cpu-fp32", 1, precision="fp32", device="cpu")
    fp32 = small.train("fp32", 1, precision="fp32", determinism="off")
    bf16 = small.train("bf16", 1, precision="bf16", determinism="off")
    yield compare_step_losses(f"{small.device} fp32, CPU fp32", fp32, wanted, FP32_LIMIT)
    yield compare_step_losses(f"{small.device} bf16, CPU fp32", bf16, wanted, BF16_LIMIT)
    learned = wanted.losses[min(wanted.losses)] - wanted.losses[max(wanted.losses)]
    yield MachineComparison("the network learns", f"{learned:.3f} nats", "> 0.5", learned > 0.5)
    for size in [size for size in sizes if size > 1][-1:]:
        for parallel in ("ddp", "fsdp"):
            many = small.train(f"{parallel}-off", size, precision="bf16", determinism="off", parallel=parallel)
            yield compare_step_losses(f"bf16: {parallel} on {size} ranks, one process", many, bf16, ORDER_LIMIT)


def compare_hashes(small: SmallRun, sizes: Sequence[int]) -> Iterator[MachineComparison]:
    """Compare the hashes of weights and moments of each step under determinism elastic; report the self-tests."""
    for precision in ("bf16", "fp32"):
        layouts = [(size, parallel) for parallel in ("ddp", "fsdp") for size in sizes]
        first: SmallResult | None = None
        for size, parallel in layouts if precision == "bf16" else [layouts[0], layouts[-1]]:
            name = f"{precision}-{parallel}-{size}"
            trained = small.train(name, size, precision=precision, determinism="elastic", parallel=parallel)
            first = first or trained
            yield compare_step_hashes(f"{precision} {parallel} on {size} ranks, first layout", trained, first)
            if trained.self_test is not None:
                said = "repeats" if trained.self_test else "differs"
                yield MachineComparison(
                    f"{precision} {parallel} on {size} ranks: self-test", said, "repeats", trained.self_test
                )


def compare_resumed(small: SmallRun, sizes: Sequence[int]) -> Iterator[MachineComparison]:
    """Compare a run that was killed on all ranks and resumed on another layout with an uninterrupted one."""
    interval, options = max(1, small.steps // 4), {"precision": "bf16", "determinism": "elastic"}
    straight = small.train("straight", 1, checkpoint_interval=interval, **options)
    for size, parallel in ((sizes[-1], "ddp"), (sizes[0], "fsdp")):
        began = time.monotonic()
        killed = small.kill(f"killed-{parallel}", size, interval, parallel=parallel, **options)
        resumed = small.resume(f"killed-{parallel}", sizes[0] if size != sizes[0] else sizes[-1])
        what = f"killed -9 on {size} ranks, {parallel}, at step {killed}; resumed, uninterrupted"
        if killed is None:
            yield MachineComparison(what, "it ended before it was killed", "killed", False)
            continue
        yield compare_step_hashes(f"{what}, {time.monotonic() - began:.0f} s", resumed, straight)


def compare_step_losses(what: str, one: SmallResult, other: SmallResult, limit: float) -> MachineComparison:
    differences = [abs(one.losses.get(step, math.nan) - loss) for step, loss in other.losses.items()]
    held = bool(differences) and all(difference <= limit for difference in differences)  # a nan is no match
    largest = math.nan if any(map(math.isnan, differences)) else max(differences, default=math.nan)
    return MachineComparison(f"losses: {what}", f"{largest:.1e}", f"{limit:g}", held)


def compare_step_hashes(what: str, one: SmallResult, other: SmallResult) -> MachineComparison:
    different = [step for step, digest in other.hashes.items() if one.hashes.get(step) != digest]
    found = f"step {different[0]} differs" if different else f"{len(other.hashes)} steps equal"
    return MachineComparison(f"hashes: {what}", found, "equal", bool(other.hashes) and not different)


if __name__ == "__main__":
    command.run(main)
