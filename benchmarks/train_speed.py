"""Tokens a second of training, and how far that is from what this hardware can do.

python benchmarks/train_speed.py [--sizes 124M 350M] [--kernels] [--beside-nanogpt PATH]

The run's own loop on random tokens: feed, compiled blocks, accumulation, clipping, AdamW, a logged line each step;
medians over the steps. Default: 124M in steps of half a million tokens on a GPU, a small network on a CPU. Needs torch,
numpy, safetensors, attrs, jaxtyping, tqdm and matplotlib; nanoGPT's clone only where it is asked for.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import kernels
import nanogpt
import torch
from random_run import ROOT, prepare

from errors import BadInput
from model.config import GPT2_SIZES, ModelConfig, flops_per_token
from training.memory import GIB, largest_microbatch

WARM_UP = 3  # steps that are not counted: compilation, clocks
SMALL = ModelConfig(
    vocab_size=256, context_length=256, emb_dim=384, n_heads=6, n_layers=6, qkv_bias=True, tie_weights=True
)
SIZES = {"small": SMALL, **GPT2_SIZES}
STEP_TOKENS = {"cuda": 1 << 19, "cpu": 1 << 11}
LARGEST_MICROBATCH = 64  # more gains nothing where it fits
HEADROOM = 0.05  # of a GPU's memory


@attrs.frozen(kw_only=True)
class Batch:
    """How a step is made up."""

    ranks: int
    microbatch_size: int
    accumulation: int

    @property
    def sequences(self) -> int:
        return self.ranks * self.microbatch_size * self.accumulation


def main() -> None:
    """Print the tables."""
    arguments = _parse_arguments()
    try:
        for size in arguments.sizes:
            batch = _batch(SIZES[size], arguments)
            if arguments.beside_nanogpt is None:
                _report(size, batch, arguments)
            else:
                _compare(size, batch, arguments)
    except BadInput as error:
        sys.exit(f"train_speed.py: {error}")


def _parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["124M" if cuda else "small"], choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=50 if cuda else 10, help="that count; 3 more come before")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--microbatch", type=int, metavar="N", help="sequences; default: predicted, 64 at most; CPU: 4")
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS["cuda" if cuda else "cpu"], metavar="N")
    parser.add_argument("--threads", type=int, default=1, help="of a rank on a CPU")
    parser.add_argument("--kernels", action="store_true", help="what kinds of kernels take the time")
    parser.add_argument("--beside-nanogpt", type=Path, metavar="PATH", help="a clone of it, run in turn with this one")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of train.json; may be repeated"
    )
    return parser.parse_args()


def _batch(model: ModelConfig, arguments: argparse.Namespace) -> Batch:
    """Return a step of --step-tokens at the most, in the micro-batches that were asked for or that are predicted."""
    share = max(1, arguments.step_tokens // model.context_length // arguments.ranks)  # of a rank, sequences
    size = arguments.microbatch
    if size is None:
        fits: int | None = 4
        if torch.cuda.is_available():
            usable = int((1 - HEADROOM) * torch.cuda.get_device_properties(0).total_memory)
            fits = largest_microbatch(model, "ddp", arguments.ranks, usable)
        largest = min(fits or 1, share, LARGEST_MICROBATCH)
        size = next(size for size in range(largest, 0, -1) if share % size == 0)
    return Batch(ranks=arguments.ranks, microbatch_size=size, accumulation=max(1, share // size))


def _report(size: str, batch: Batch, arguments: argparse.Namespace) -> None:
    settings = dict(setting.split("=", 1) for setting in arguments.set)
    result = _measure(SIZES[size], batch, arguments, **settings)
    environment, model = result["environment"], SIZES[size]
    tokens_per_second = result["tokens_per_step"] / _median(result["wall"])
    flops = flops_per_token(model) * tokens_per_second / batch.ranks
    peaks = {int(trial): peak / GIB for trial, peak in result["peak_bytes"].items()}
    (small, small_peak), (large, large_peak) = min(peaks.items()), max(peaks.items())
    sequences = (large - small) * model.context_length / 1024  # of 1,024 tokens
    versions = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    rows = {
        "model": f"{size}, context {model.context_length}",
        "hardware": f"{batch.ranks} x {environment['device']}",
        "versions": f"Python {environment['python']}, {versions}, CUDA {environment['cuda'] or 'none'}",
        "commit": result["commit"],
        "numerics": ", ".join(f"{key} {value}" for key, value in result["numerics"].items()),
        "step": f"{result['tokens_per_step']:,} tokens = {batch.ranks} ranks x {batch.accumulation} x "
        f"{batch.microbatch_size} sequences; median of {len(result['wall']) - WARM_UP}",
        "tokens/s": f"{tokens_per_second:,.0f}",
        "MFU": _share(flops, result["peak_flops"]),
        "of a matmul": f"{_share(flops, result['matmul_flops'])} of the measured {result['matmul_flops'] / 1e12:,.2f} "
        "TFLOP/s",
        "peak memory": f"{large_peak:.2f} GiB" + ("" if result["gpu_bytes"] else ", of the process"),
        "per sequence": "not measured"
        if large == small
        else f"{(large_peak - small_peak) / sequences:.3f} GiB for "
        f"1,024 tokens, from micro-batches of {small} and {large}",
    }
    print("\n".join(f"{name:14}{value}" for name, value in rows.items()))
    if result["kernels"] is not None:
        gpu = kernels.roofline_name(environment["device"], result["gpu_bytes"])
        print("\n".join(["", *kernels.table(result["kernels"], model, gpu)]))
    print(flush=True)


def _compare(size: str, batch: Batch, arguments: argparse.Namespace) -> None:
    """Print both trainers' tokens/s at the same shapes, in turn, in fp32 and bf16, compiled and not."""
    model, tokens = SIZES[size], batch.sequences * SIZES[size].context_length
    if batch.ranks != 1:
        raise BadInput("--beside-nanogpt compares one process with one; leave --ranks out")
    print(f"{size}, {tokens:,} tokens a step, medians of {arguments.steps} steps; tokens/s (by CPU seconds) and ratios")
    columns = ("nanoGPT", "as it is", "ratio", "determinism off", "ratio")
    print(f"{'':18}" + "".join(f"{column:>20}" for column in columns), flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for precision in ("fp32", "bf16"):
        for compiled in (False, True):
            how: dict[str, Any] = {"precision": precision, "compile": compiled}
            setting = nanogpt.Setting(
                model=model,
                microbatch_size=batch.microbatch_size,
                accumulation=batch.accumulation,
                threads=arguments.threads,
                device=device,
                precision=precision,
                compiled=compiled,
            )
            with tempfile.TemporaryDirectory() as name:
                nanogpt.prepare(arguments.beside_nanogpt, Path(name) / "nanogpt", model)
                wall, cpu = nanogpt.measure(Path(name) / "nanogpt", setting, arguments.steps + WARM_UP)
            theirs = _speeds(tokens, wall, cpu)
            cells = [_cell(theirs)]
            for extra in ({}, {"determinism": "off"}):
                ours = _measure(model, batch, arguments, **how, **extra)
                speeds = _speeds(tokens, ours["wall"], ours["cpu"])
                cells += [_cell(speeds), _cell([one / other for one, other in zip(speeds, theirs, strict=False)], 2)]
            label = f"{precision}{', compiled' if compiled else ''}"
            print(f"{label:18}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def _measure(model: ModelConfig, batch: Batch, arguments: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """Return what benchmarks/measured_run.py says of this model. Raises BadInput where it fails."""
    keys = {
        "microbatch_size": batch.microbatch_size,
        "global_batch_size": batch.sequences,
        "cpu_threads": arguments.threads,
        **{key: _value(value) for key, value in settings.items()},
    }
    with tempfile.TemporaryDirectory() as name:
        run, output = prepare(Path(name), model, arguments.steps + WARM_UP + 1, **keys), Path(name) / "result.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={batch.ranks}"]
        command = [sys.executable, *(launcher if batch.ranks > 1 else [])]
        command += [str(Path(__file__).with_name("measured_run.py")), str(run), str(output)]
        command += ["--memory"] if arguments.beside_nanogpt is None else []
        command += ["--kernels"] if arguments.kernels else []
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
        if done.returncode:
            raise BadInput(f"the measurement failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return json.loads(output.read_text())


def _value(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text  # a bare word


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds[WARM_UP:])


def _speeds(tokens: int, *clocks: list[float]) -> list[float]:
    return [tokens / _median(seconds) for seconds in clocks if seconds]


def _cell(values: list[float], digits: int = 0) -> str:
    wall, *cpu = (f"{value:,.{digits}f}" for value in values)
    return f"{wall} ({cpu[0]})" if cpu else wall


def _share(flops: float, of: float | None) -> str:
    return "unknown: no published peak of this hardware" if of is None else f"{flops / of:.1%}"


if __name__ == "__main__":
    main()
