"""Training steps on emulated GPUs: host time, launches, collectives, host waits, and peak memory with its prediction.

tests/fakegpu/run python benchmarks/emulated_steps.py [--parallel ddp fsdp] [--determinism off elastic]

Emulated GPUs compute nothing (tests/fakegpu/README.md): counts, bytes and host time are real, but device time is not.
Each row is measured in a process that is rank 0 of --world-size ranks. The other ranks do not exist, and collectives
return at once. Host times are medians of --steps steps, without warm-up. "first" is the peak memory of the first step,
and "later" is the peak memory of all later steps.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import attrs
import bench
import torch
import torch.distributed as dist
from bench import GROUP_SECONDS, SIZES, WARM_UP, Size
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend "fake"

from common.errors import BadInput
from tests.fakegpu.recorder import launches, record
from training.config.train_config import load_run
from training.loop import collect_garbage
from training.parallel.process_group import ALONE, Ranks, groups_of, start
from training.planning.memory_model import GIB, MemoryModel
from training.replay.self_test import random_batches
from training.step import train_step

COLUMNS = [
    "layout", "host ms", "min", "cpu ms", "min", "launches", "streams", "waits", "NCCL calls", "NCCL MB",
    "first GiB", "later GiB", "predicted GiB", "reserved GiB", "predicted GiB",
]  # fmt: skip


@attrs.frozen(kw_only=True)
class EmulatedLayout:
    """The network, batch and settings of one row."""

    size: Size
    microbatch: int
    accumulation: int
    world_size: int
    settings: tuple[str, ...]  # KEY=VALUE of train.json

    def train_keys(self) -> dict[str, object]:
        """Return the keys of train.json that are not in `settings`."""
        return {
            "dataset": "random",
            "min_train_tokens": 10**10,
            "microbatch_size": self.microbatch,
            "gradient_accumulation_steps": self.accumulation,
            "clipping_max_norm": 1.0,
        }

    def __str__(self) -> str:
        shape = f"{self.microbatch} x {self.accumulation} x {self.world_size}"
        return " ".join([self.size, shape, *(setting.partition("=")[2] for setting in self.settings)])


@attrs.frozen(kw_only=True)
class EmulatedSteps:
    """The measurements of one row. Counts and bytes are those of one step after warm-up."""

    host_ms: float
    least_host_ms: float
    cpu_ms: float
    least_cpu_ms: float
    launches: int
    streams: list[int]  # launches on each stream, in descending order
    synchronizations: dict[str, int]  # by function
    collectives: dict[str, tuple[int, int]]  # calls and bytes by name
    copies: dict[str, tuple[int, int]]  # calls and bytes by direction
    kernels: dict[str, int]  # launches by name, in descending order
    first_peak: int  # allocated bytes in the first step
    later_peak: int  # allocated bytes in later steps
    peaks: list[int]  # allocated bytes in each step
    reserved_peak: int
    predicted: int  # allocated bytes
    predicted_reserved: int
    pinned_growth: int  # growth of page-locked host memory after the warm-up (which includes autotuning), in bytes

    def row(self, name: str) -> list[str]:
        """Return the cells of a table."""
        calls, sizes = (sum(value[index] for value in self.collectives.values()) for index in (0, 1))
        times = (self.host_ms, self.least_host_ms, self.cpu_ms, self.least_cpu_ms)
        peaks = (self.first_peak, self.later_peak, self.predicted, self.reserved_peak, self.predicted_reserved)
        counts = (self.launches, len(self.streams), sum(self.synchronizations.values()), calls)
        return [
            name,
            *(f"{value:.1f}" for value in times),
            *(f"{value:,}" for value in counts),
            f"{sizes / 1e6:,.1f}",
            *(f"{value / GIB:.2f}" for value in peaks),
        ]


@attrs.frozen
class _StepCost:
    wall_ms: float
    cpu_ms: float
    peak: int  # bytes allocated


def main(  # noqa: PLR0913  # each argument is an option
    *,
    sizes: tuple[Size, ...] = ("124M",),
    parallel: tuple[Literal["ddp", "fsdp"], ...] = ("ddp",),
    determinism: tuple[Literal["off", "run", "elastic"], ...] = ("off",),
    microbatch: int = 16,
    accumulation: int = 1,
    world_size: tuple[int, ...] = (8,),
    steps: int = 20,
    set: tuple[str, ...] = (),
    as_json: bool = False,
) -> None:
    """Print a row for each combination. With --as-json, measure one combination in this process."""
    launches()  # raises BadInput without the emulated driver
    layouts = [
        EmulatedLayout(
            size=size,
            microbatch=microbatch,
            accumulation=accumulation,
            world_size=ranks,
            settings=(f"parallel={kind}", f"determinism={level}", *set),
        )
        for size, ranks, kind, level in itertools.product(sizes, world_size, parallel, determinism)
    ]
    if not as_json:
        rows = [_in_process(layout, steps).row(str(layout)) for layout in layouts]
        print(bench.table(COLUMNS, rows))
        return
    if len(layouts) > 1:
        raise BadInput(f"--as-json: got {len(layouts)} combinations of options, expected one")
    print(json.dumps(attrs.asdict(measure(layouts[0], steps))), flush=True)
    os._exit(0)  # leaving the process group would wait for the other ranks


def measure(layout: EmulatedLayout, steps: int) -> EmulatedSteps:
    """Train some steps in this process, and return their measurements. This works only once in a process."""
    with TemporaryDirectory() as folder:
        run = load_run(bench.write_run(Path(folder), SIZES[layout.size], layout.train_keys()), layout.settings)
    sharing = run.train.execution.tensor_parallel
    ranks = lone_rank(layout.world_size, sharing) if layout.world_size > 1 else start("cuda", GROUP_SECONDS)
    state, settings = bench.build(run, ranks)
    make_batch = random_batches(settings.layout, run.model.vocab_size, ranks)
    batches = itertools.cycle([make_batch() for _ in range(layout.accumulation)])

    def train(step: int) -> None:
        train_step(state, settings, step, lambda: next(batches))

    costs = []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            pinned = _pinned_bytes()
        costs.append(_cost(train, step))
        collect_garbage(step + 1)
    with record() as recording:
        last = _cost(train, len(costs))
    predicted = MemoryModel.of(run.model, run.train, layout.world_size).predict(layout.microbatch)
    wall, cpu = ([getattr(cost, name) for cost in costs[WARM_UP:]] for name in ("wall_ms", "cpu_ms"))
    return EmulatedSteps(
        host_ms=statistics.median(wall),
        least_host_ms=min(wall),
        cpu_ms=statistics.median(cpu),
        least_cpu_ms=min(cpu),
        launches=recording.launches,
        streams=sorted(recording.streams.values(), reverse=True),
        synchronizations=dict(recording.synchronizations),
        collectives={name: (traffic.calls, traffic.bytes) for name, traffic in recording.collectives.items()},
        copies={name: (traffic.calls, traffic.bytes) for name, traffic in recording.copies.items()},
        kernels=dict(recording.kernels.most_common()),
        first_peak=costs[0].peak,
        later_peak=max(cost.peak for cost in [*costs[1:], last]),
        peaks=[cost.peak for cost in [*costs, last]],
        reserved_peak=torch.cuda.max_memory_reserved(),
        predicted=predicted.allocated,
        predicted_reserved=predicted.reserved,
        pinned_growth=_pinned_bytes() - pinned,
    )


def lone_rank(world_size: int, tensor_parallel: int = 1) -> Ranks:
    """Return rank 0 of a job whose other ranks do not exist. Collectives use only this rank's data."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.HashStore()
    dist.init_process_group("cpu:fake,cuda:nccl", store=store, rank=0, world_size=world_size, device_id=device)
    control = dist.new_group(backend="fake")
    return Ranks(
        rank=0,
        world_size=world_size,
        node=ALONE,
        device=device,
        control=control,
        download=control,
        **groups_of(world_size, tensor_parallel),
    )


def _cost(train: Callable[[int], None], step: int) -> _StepCost:
    torch.cuda.reset_peak_memory_stats()
    began, began_cpu = time.perf_counter(), time.process_time()
    train(step)
    wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    return _StepCost(1e3 * wall, 1e3 * cpu, torch.cuda.max_memory_allocated())


def _pinned_bytes() -> int:
    """Return the bytes of page-locked host memory that torch holds, including memory that is not in use."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def _in_process(layout: EmulatedLayout, steps: int) -> EmulatedSteps:
    """Measure a layout in a separate process."""
    options = {"--sizes": layout.size, "--world-size": layout.world_size, "--microbatch": layout.microbatch}
    options |= {"--accumulation": layout.accumulation, "--steps": steps}
    words = [str(word) for pair in options.items() for word in pair]
    script = [sys.executable, __file__, "--as-json", *words, "--set", *layout.settings]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BadInput(f"{layout}: the measurement failed with exit status {done.returncode}")
    return EmulatedSteps(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    bench.run(main)
