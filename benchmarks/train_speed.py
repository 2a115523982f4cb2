"""Tokens a second of training, and how far that is from what this hardware can do.

python benchmarks/train_speed.py [--sizes 124M 350M] [--kernels] [--beside-nanogpt PATH]

train.py on random tokens: feed, compiled blocks, accumulation, clipping, AdamW, a logged line each step; medians over
the steps. Default: 124M in steps of half a million tokens on a GPU, a small network on a CPU. Each run ends with a
checkpoint in the temporary directory: 12 bytes a parameter.
"""

import json
import statistics
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import attrs
import command
import random_run
import torch
from beside_nanogpt import WARM_UP, NanogptComparison
from cyclopts import Parameter

from common.errors import BadInput
from model.config import GPT2_SIZES, ModelConfig, flops_per_token
from tokens.batches.sampling import Layout
from training.checkpoints.run_record import RESOLVED
from training.config.train_config import load_run
from training.hardware.gpus import named_gpus
from training.planning.memory_model import GIB, MemoryModel

SMALL = ModelConfig(
    vocab_size=256, context_length=256, emb_dim=384, n_heads=6, n_layers=6, qkv_bias=True, tie_weights=True
)
SIZES = {"small": SMALL, **GPT2_SIZES}
LARGEST_MICROBATCH = 64  # more gains nothing where it fits
HEADROOM = 0.05  # of a GPU's memory
MATMUL_SIDE, MATMUL_SIDE_CPU = 8192, 1024
MATMUL_SECONDS = 2.0  # long enough for a GPU to come down to the clock that it holds


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class SpeedBenchmark:
    """Command-line options; None: the default of a GPU, or of a CPU."""

    sizes: tuple[Literal["small", "124M", "350M", "774M", "1.5B"], ...] = ()
    """default: 124M; CPU: small"""
    steps: int | None = None
    """that count, after 3 others; default: 50; CPU: 10"""
    ranks: int = 1
    parallel: tuple[Literal["ddp", "fsdp"], ...] = ("ddp",)
    """one after the other, compared"""
    microbatch: int | None = None
    """sequences; default: predicted, 64 at most; CPU: 4"""
    step_tokens: int | None = None
    """default: 524,288; CPU: 2,048"""
    threads: int = 1
    """of a rank on a CPU"""
    kernels: bool = False
    """what kinds of kernels take the time"""
    beside_nanogpt: Path | None = None
    """on a CPU, beside this clone of it"""
    not_compiled: bool = False
    """beside nanoGPT: only without torch.compile"""
    set: tuple[str, ...] = ()
    """KEY=VALUE of train.json; may be repeated"""

    @property
    def cuda(self) -> bool:
        """True if GPUs are measured."""
        return torch.cuda.is_available() and self.beside_nanogpt is None

    @property
    def counted_steps(self) -> int:
        """Steps that count."""
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
                steps=options.counted_steps,
                threads=options.threads,
            ).print(size, compiled=not options.not_compiled)
            continue
        speeds = {kind: _report(size, layout, kind, options) for kind in options.parallel}
        first, *others = speeds
        for kind in others:
            print(f"{kind} / {first}: {speeds[kind] / speeds[first]:.3f} of its tokens/s\n", flush=True)


def _layout(model: ModelConfig, options: SpeedBenchmark) -> Layout:
    """Return a step of --step-tokens at the most, in the micro-batches that were asked for or that are predicted."""
    tokens = options.step_tokens or (1 << 19 if options.cuda else 1 << 11)
    share = max(1, tokens // model.context_length // options.ranks)  # of a rank, sequences
    size = options.microbatch
    if size is None:
        largest = min(_predicted(model, options) if options.cuda else 4, share, LARGEST_MICROBATCH)
        size = next(size for size in range(largest, 0, -1) if share % size == 0)
    return Layout(
        context_length=model.context_length,
        microbatch_size=size,
        accumulation=max(1, share // size),
        data_parallel_size=options.ranks,
    )


def _predicted(model: ModelConfig, options: SpeedBenchmark) -> int:
    """Return the largest micro-batch that is predicted to fit this GPU in every way to be measured."""
    usable = int((1 - HEADROOM) * torch.cuda.get_device_properties(0).total_memory)
    with TemporaryDirectory() as folder:
        keys = {"dataset": "random", "microbatch_size": 1}
        train = load_run(random_run.write_run(Path(folder), attrs.asdict(model), keys), options.set).train
    models = [MemoryModel.of(model, train.replace(parallel=kind), options.ranks) for kind in options.parallel]
    return min(memory.largest_microbatch(usable) or 1 for memory in models)


def _report(size: str, layout: Layout, kind: str, options: SpeedBenchmark) -> float:
    model = SIZES[size]
    settings = [f"parallel={kind}", f"cpu_threads={options.threads}", *options.set]
    half = attrs.evolve(layout, microbatch_size=-(-layout.microbatch_size // 2))
    with TemporaryDirectory() as name:
        run, records = _train(Path(name) / "whole", model, layout, options.counted_steps, settings)
        _, half_records = _train(Path(name) / "half", model, half, 0, settings)
        record = json.loads((run / RESOLVED).read_text())
        kernels = _kernels(run, layout.data_parallel_size, settings) if options.kernels else ""
    environment, numerics = record["environment"], record["numerics"]
    tokens = layout.global_batch_size * model.context_length
    seconds = random_run.seconds_by_step(records, tokens)
    counted = [value for step, value in seconds.items() if step > WARM_UP]
    speed = tokens / statistics.median(counted)
    flops = flops_per_token(model) * speed / layout.data_parallel_size
    matmul = _matmul_flops(numerics["precision"], options)
    peak, slope = random_run.peak_memory(records) / GIB, layout.microbatch_size - half.microbatch_size
    gained = (peak - random_run.peak_memory(half_records) / GIB) / (slope * model.context_length / 1024 or 1)
    versions = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    how = {name: numerics[name] for name in ("determinism", "precision", "compiled", "attention")}
    rows = {
        "model": f"{size}, context {model.context_length}",
        "hardware": f"{layout.data_parallel_size} x {environment['device']}",
        "versions": f"Python {environment['python']}, {versions}, CUDA {environment['cuda'] or 'none'}",
        "commit": record["git_commit"],
        "how": ", ".join([kind, *(f"{key} {value}" for key, value in how.items())]),
        "step": f"{tokens:,} tokens = {layout.data_parallel_size} ranks x {layout.accumulation} x "
        f"{layout.microbatch_size} sequences; median of {len(counted)}",
        "tokens/s": f"{speed:,.0f}",
        "MFU": _share(flops, next((gpu.peak_flops for gpu in named_gpus(environment["device"])), None)),
        "of a matmul": f"{_share(flops, matmul)} of the measured {matmul / 1e12:,.2f} TFLOP/s",
        "peak memory": f"{peak:.2f} GiB" + ("" if options.cuda else ", of the process"),
        "per sequence": f"{gained:.3f} GiB for 1,024 tokens, from micro-batches of {half.microbatch_size} and "
        f"{layout.microbatch_size}"
        if slope
        else "not measured",
    }
    print("\n".join(f"{name:14}{value}" for name, value in rows.items()), kernels, sep="\n\n", flush=True)
    return speed


def _train(
    folder: Path, model: ModelConfig, layout: Layout, counted: int, settings: list[str]
) -> tuple[Path, list[dict[str, Any]]]:
    """Train a run for that many steps after those that do not count; return its directory and metrics."""
    sizes = {"microbatch_size": layout.microbatch_size, "global_batch_size": layout.global_batch_size}
    run = random_run.prepare(folder, model, WARM_UP + counted, **sizes)
    return run, random_run.train(run, layout.data_parallel_size, *settings)[0]


def _kernels(run: Path, ranks: int, settings: list[str]) -> str:
    script = [*random_run.launcher(ranks), str(Path(__file__).with_name("kernels.py")), str(run), *settings]
    done = subprocess.run(script, cwd=command.ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        raise BadInput(f"--kernels: the measurement failed:\n{done.stderr[-4000:]}")
    return f"{done.stdout}\n"


def _matmul_flops(precision: str, options: SpeedBenchmark) -> float:
    """Return the FLOP/s of a square product of random matrices, bf16 on a GPU, the run's precision on a CPU."""
    torch.set_num_threads(options.threads)
    side, device = (MATMUL_SIDE, "cuda") if options.cuda else (MATMUL_SIDE_CPU, "cpu")
    dtype = torch.float32 if precision == "fp32" and not options.cuda else torch.bfloat16
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds: list[float] = []
    while sum(seconds) < MATMUL_SECONDS:
        began = time.perf_counter()
        left @ right
        if options.cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return float(2 * side**3 / statistics.median(seconds))


def _share(flops: float, of: float | None) -> str:
    return "unknown: no published peak of this hardware" if of is None else f"{flops / of:.1%}"


if __name__ == "__main__":
    command.run(main)
