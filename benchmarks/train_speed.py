"""Training speed in tokens per second, also as a share of the hardware's peak and of a measured matrix product.

python benchmarks/train_speed.py [--sizes 124M 350M] [--beside-nanogpt PATH]

The benchmark runs train.py on random tokens, with everything that a step includes: loading the batch, compiled blocks,
accumulation, clipping, AdamW and a logged line. Results are medians over the steps. By default, the benchmark trains
124M in steps of half a million tokens on a GPU, or a small network on a CPU. Runs are killed after their last step, but
train.py still needs room for a checkpoint (12 bytes per parameter) in the temporary directory.
"""

import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import attrs
import bench
import torch
from bench import SIZES, WARM_UP, Size
from beside_nanogpt import NanogptComparison
from cyclopts import Parameter

from model.config import ModelConfig
from model.counts import flops_per_token
from tokens.batches.sampling import Layout
from training.checkpoints.run_record import RESOLVED
from training.config.train_config import load_run
from training.hardware.gpus import named_gpus
from training.planning.memory_model import GIB, MemoryModel
from training.telemetry.metrics_log import Metric

LARGEST_MICROBATCH = 64  # larger micro-batches are not faster
HEADROOM = 0.05  # share of a GPU's memory that is not used
MATMUL_SIDES = {"cuda": 8192, "cpu": 1024}
MATMUL_SECONDS = 2.0  # long enough for a GPU to reach its sustained clock


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class SpeedBenchmark:
    """Command-line options. None means the default for a GPU or a CPU."""

    sizes: tuple[Size, ...] = ()
    """network sizes; default: 124M on a GPU, small on a CPU"""
    steps: int | None = None
    """number of measured steps, after 3 warm-up steps; default: 50 on a GPU, 10 on a CPU"""
    ranks: int = 1
    parallel: tuple[Literal["ddp", "fsdp"], ...] = ("ddp",)
    """wrappers to measure, one after another, and to compare"""
    microbatch: int | None = None
    """sequences in a micro-batch; default: on a GPU, the predicted largest, up to 64; on a CPU, 4"""
    step_tokens: int | None = None
    """tokens in a step; default: 524,288 on a GPU, 2,048 on a CPU"""
    threads: int = 1
    """threads of each rank on a CPU"""
    beside_nanogpt: Path | None = None
    """compare with this clone of nanoGPT, on a CPU"""
    not_compiled: bool = False
    """with --beside-nanogpt: measure only without torch.compile"""
    minutes: float = 5.0
    """with --beside-nanogpt: time limit of each table; a slow CPU, such as one without fast bf16, does fewer steps"""
    set: tuple[str, ...] = ()
    """KEY=VALUE of train.json; may be repeated"""

    @property
    def cuda(self) -> bool:
        """Whether GPUs are measured."""
        return torch.cuda.is_available() and self.beside_nanogpt is None

    @property
    def measured_steps(self) -> int:
        """The number of steps that are measured, after the warm-up."""
        return self.steps or (50 if self.cuda else 10)


def main(options: SpeedBenchmark = SpeedBenchmark()) -> None:
    """Print the tables."""
    for size in options.sizes or (("124M",) if options.cuda else ("small",)):
        model = SIZES[size]
        layout = _layout(model, options)
        if options.beside_nanogpt is not None:
            NanogptComparison(
                clone=options.beside_nanogpt,
                model=model,
                layout=layout,
                steps=options.measured_steps,
                threads=options.threads,
                minutes=options.minutes,
            ).print(size, compiled=not options.not_compiled)
            continue
        speeds = {kind: _report(size, layout, kind, options) for kind in options.parallel}
        first, *other_kinds = speeds
        for kind in other_kinds:
            print(f"{kind}: {speeds[kind] / speeds[first]:.3f} x the tokens/s of {first}\n", flush=True)


def _layout(model: ModelConfig, options: SpeedBenchmark) -> Layout:
    """Return a step of at most --step-tokens tokens, with the requested or predicted micro-batch."""
    tokens = options.step_tokens or (1 << 19 if options.cuda else 1 << 11)
    share = max(1, tokens // model.context_length // options.ranks)  # sequences that a rank processes in a step
    size = options.microbatch
    if size is None:
        largest = min(_predicted(model, options, share) if options.cuda else 4, share, LARGEST_MICROBATCH)
        size = next(size for size in range(largest, 0, -1) if share % size == 0)
    return Layout(
        context_length=model.context_length,
        microbatch_size=size,
        microbatches=max(1, share // size) * options.ranks,
        data_parallel_size=options.ranks,
    )


def _predicted(model: ModelConfig, options: SpeedBenchmark, share: int) -> int:
    """Return the largest micro-batch that is predicted to fit on this GPU, whichever wrapper is measured.

    `share` is the number of sequences that a rank processes in a step.
    """
    usable = int((1 - HEADROOM) * torch.cuda.get_device_properties(0).total_memory)
    with TemporaryDirectory() as folder:
        keys = {"dataset": "random", "microbatch_size": 1, "global_batch_size": share * options.ranks}
        train = load_run(bench.write_run(Path(folder), model, keys), options.set).train
    models = [MemoryModel.of(model, train.replace(parallel=kind), options.ranks) for kind in options.parallel]
    return min(memory.largest_microbatch(usable) or 1 for memory in models)


def _report(size: str, layout: Layout, kind: str, options: SpeedBenchmark) -> float:
    """Measure one wrapper and return its tokens/s. Each row is printed as soon as it is known."""
    model, ranks = SIZES[size], layout.data_parallel_size
    settings = [f"parallel={kind}", f"cpu_threads={options.threads}", *options.set]
    with TemporaryDirectory() as name:
        steps = WARM_UP + options.measured_steps
        sizes = {"microbatch_size": layout.microbatch_size, "global_batch_size": layout.global_batch_size}
        run = bench.prepare(Path(name), model, steps, **sizes)
        records = bench.train(run, ranks, *settings, kill_after=steps)
        record = json.loads((run / RESOLVED).read_text())
        tokens = layout.global_batch_size * model.context_length
        seconds = bench.seconds_by_step(records, tokens)
        measured = [step_seconds for step, step_seconds in seconds.items() if step > WARM_UP]
        speed = tokens / statistics.median(measured)
        peak = max(record[Metric.PEAK_MEMORY_BYTES] for record in records if Metric.TRAIN_LOSS in record) / GIB
        _print_row("model", f"{size}, context {model.context_length}")
        _print_setup(record, kind, ranks)
        shape = f"{ranks} ranks x {layout.accumulation} x {layout.microbatch_size} sequences"
        _print_row("step", f"{tokens:,} tokens = {shape}; median of {len(measured)}")
        _print_row("tokens/s", f"{speed:,.0f}")
        _print_row("peak memory", f"{peak:.2f} GiB" + ("" if options.cuda else ", of the process"))
        _print_utilization(record, flops_per_token(model) * speed / ranks, options)
        print(flush=True)
    return speed


def _print_setup(record: dict[str, Any], kind: str, ranks: int) -> None:
    """Print the hardware, versions, commit and numerics that a run's record contains."""
    environment, numerics = record["environment"], record["numerics"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    how = {name: numerics[name] for name in ("determinism", "precision", "compiled", "attention")}
    _print_row("hardware", f"{ranks} x {environment['device']}")
    _print_row("versions", f"Python {environment['python']}, {versions}, CUDA {environment['cuda'] or 'none'}")
    _print_row("commit", record["git_commit"])
    _print_row("how", ", ".join([kind, *(f"{key} {value}" for key, value in how.items())]))


def _print_utilization(record: dict[str, Any], flops: float, options: SpeedBenchmark) -> None:
    """Print the FLOP/s of a rank as shares of the published peak and of a measured matrix product."""
    peak = next((gpu.peak_flops for gpu in named_gpus(record["environment"]["device"])), None)
    matmul = matmul_flops("cuda" if options.cuda else "cpu", record["numerics"]["precision"], options.threads)
    _print_row("MFU", "unknown: no published peak for this hardware" if peak is None else f"{flops / peak:.1%}")
    _print_row("of a matmul", f"{flops / matmul:.1%} of the measured {matmul / 1e12:,.2f} TFLOP/s")


def matmul_flops(device: Literal["cuda", "cpu"], precision: str, threads: int) -> float:
    """Return the FLOP/s of a large square matrix product, in bf16 on a GPU.

    This is a tighter upper bound on the speed of training than the number in the datasheet.
    """
    torch.set_num_threads(threads)
    side = MATMUL_SIDES[device]
    dtype = torch.float32 if precision == "fp32" and device == "cpu" else torch.bfloat16
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds = []
    until = time.perf_counter() + MATMUL_SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    del left, right
    torch.cuda.empty_cache()  # later runs need the GPU's memory
    return float(2 * side**3 / statistics.median(seconds))


def _print_row(name: str, value: object) -> None:
    print(f"{name:14}{value}", flush=True)


if __name__ == "__main__":
    bench.run(main)
