"""Tokens a second of training, and how far that is from what this hardware can do.

python benchmarks/train_speed.py [--sizes 124M 350M] [--kernels] [--beside-nanogpt PATH]

The run's own loop on random tokens: feed, compiled blocks, accumulation, clipping, AdamW, a logged line each step;
medians over the steps. Default: 124M in steps of half a million tokens on a GPU, a small network on a CPU. Needs torch,
numpy, safetensors, attrs, jaxtyping, tqdm and matplotlib; nanoGPT's clone only where it is asked for.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import kernels
import nanogpt
import numpy as np
import torch
from in_turn import Stepper
from random_run import ROOT, prepare

from common.errors import BadInput
from common.installation import use_expandable_segments
from model.config import GPT2_SIZES, ModelConfig, flops_per_token
from training.config.key_groups import MemoryOptions
from training.hardware.environment import cpu_name, git_commit
from training.planning.memory_model import GIB, MemoryModel

WARM_UP = 3  # steps that are not counted: clocks, and compilation where nothing came before
SECONDS = 540  # of a size, on a GPU: then the steps so far count
SMALL = ModelConfig(
    vocab_size=256, context_length=256, emb_dim=384, n_heads=6, n_layers=6, qkv_bias=True, tie_weights=True
)
SIZES = {"small": SMALL, **GPT2_SIZES}
DEFAULTS: dict[bool, dict[str, Any]] = {
    True: {"sizes": ["124M"], "steps": 50, "step_tokens": 1 << 19},  # on a GPU
    False: {"sizes": ["small"], "steps": 10, "step_tokens": 1 << 11},
}
LARGEST_MICROBATCH = 64  # more gains nothing where it fits
HEADROOM = 0.05  # of a GPU's memory
PRECISIONS = ("fp32", "bf16")
RESULT = "result.json"


@attrs.frozen(kw_only=True)
class BatchShape:
    """Composition of a step: micro-batch, accumulation, ranks."""

    ranks: int
    microbatch_size: int
    accumulation: int

    @property
    def sequences(self) -> int:
        return self.ranks * self.microbatch_size * self.accumulation


def main() -> None:
    """Print the tables."""
    use_expandable_segments()  # in the processes that are started here
    arguments = _parse_arguments()
    try:
        for size in arguments.sizes:
            batch = _batch(SIZES[size], arguments)
            if arguments.beside_nanogpt is not None:
                _compare(size, batch, arguments)
                continue
            speeds = {kind: _report(size, batch, kind, arguments) for kind in arguments.parallel}
            first, *others = speeds
            for kind in others:
                print(f"{kind} / {first}: {speeds[kind] / speeds[first]:.3f} of its tokens/s\n", flush=True)
    except BadInput as error:
        sys.exit(f"train_speed.py: {error}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="default: 124M; CPU: small")
    parser.add_argument("--steps", type=int, help="that count, after 3 others; default: 50; CPU: 10")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--parallel", nargs="+", choices=("ddp", "fsdp"), default=["ddp"], help="one after the other, compared"
    )
    parser.add_argument("--microbatch", type=int, metavar="N", help="sequences; default: predicted, 64 at most; CPU: 4")
    parser.add_argument("--step-tokens", type=int, metavar="N", help="default: 524,288; CPU: 2,048")
    parser.add_argument("--threads", type=int, default=1, help="of a rank on a CPU")
    parser.add_argument("--kernels", action="store_true", help="what kinds of kernels take the time")
    parser.add_argument("--beside-nanogpt", type=Path, metavar="PATH", help="on a CPU, beside this clone of it")
    parser.add_argument("--not-compiled", action="store_true", help="beside nanoGPT: only without torch.compile")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of train.json; may be repeated"
    )
    arguments = parser.parse_args()
    arguments.cuda = torch.cuda.is_available() and arguments.beside_nanogpt is None
    for name, default in DEFAULTS[arguments.cuda].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    return arguments


def _batch(model: ModelConfig, arguments: argparse.Namespace) -> BatchShape:
    """Return a step of --step-tokens at the most, in the micro-batches that were asked for or that are predicted."""
    share = max(1, arguments.step_tokens // model.context_length // arguments.ranks)  # of a rank, sequences
    size = arguments.microbatch
    if size is None:
        fits: int | None = 4
        if arguments.cuda:
            usable = int((1 - HEADROOM) * torch.cuda.get_device_properties(0).total_memory)
            settings = _settings(arguments)
            keys = attrs.fields_dict(MemoryOptions)
            memory = MemoryModel(
                model=model,
                world_size=arguments.ranks,
                options=MemoryOptions(**{key: value for key, value in settings.items() if key in keys}),
                optimizer=settings.get("optimizer", "adamw"),
            )
            models = [attrs.evolve(memory, parallel=kind) for kind in arguments.parallel]
            fits = min(one.largest_microbatch(usable) or 1 for one in models)
        largest = min(fits or 1, share, LARGEST_MICROBATCH)
        size = next(size for size in range(largest, 0, -1) if share % size == 0)
    return BatchShape(ranks=arguments.ranks, microbatch_size=size, accumulation=max(1, share // size))


def _report(size: str, batch: BatchShape, kind: str, arguments: argparse.Namespace) -> float:
    """Print the table of one measurement; return its tokens/s."""
    result = _measure(SIZES[size], batch, kind, arguments)
    environment, model = result["environment"], SIZES[size]
    tokens_per_second = result["tokens_per_step"] / statistics.median(result["seconds"][WARM_UP:])
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
        "how": ", ".join([kind, *(f"{key} {value}" for key, value in result["numerics"].items())]),
        "step": f"{result['tokens_per_step']:,} tokens = {batch.ranks} ranks x {batch.accumulation} x "
        f"{batch.microbatch_size} sequences; median of {len(result['seconds']) - WARM_UP}",
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
        gpu = kernels.gpu_here(environment["device"], result["gpu_bytes"])
        print("\n".join(["", *kernels.table(result["kernels"], model, gpu)]))
    print(flush=True)
    return float(tokens_per_second)


def _compare(size: str, batch: BatchShape, arguments: argparse.Namespace) -> None:
    """Print both trainers' tokens/s at the same shapes on this CPU, in fp32 and bf16, compiled and not."""
    tokens = batch.sequences * SIZES[size].context_length
    print(f"{size} on {cpu_name()}, {arguments.threads} threads, torch {torch.__version__}, commit {git_commit()}")
    print(f"{tokens:,} tokens a step in micro-batches of {batch.microbatch_size}; {arguments.steps} steps in turn")
    print("medians of tokens/s and of ratios to nanoGPT's step beside it; in brackets by CPU seconds")
    for compiled, precision in itertools.product((False,) if arguments.not_compiled else (False, True), PRECISIONS):
        print(f"\n{precision + (', compiled' if compiled else ''):34}{'tokens/s':>18}{'ratio':>18}")
        trainers = _step_in_turn(SIZES[size], batch, precision, compiled, arguments)
        theirs = trainers["nanoGPT"]
        for name, seconds in trainers.items():
            print(f"{name:34}{_cell(tokens / seconds):>18}{_cell(theirs / seconds, 2):>18}", flush=True)


def _step_in_turn(
    model: ModelConfig, batch: BatchShape, precision: str, compiled: bool, arguments: argparse.Namespace
) -> dict[str, np.ndarray]:
    """Return (steps, 2) wall-clock and CPU seconds of each trainer by its name."""
    with contextlib.ExitStack() as stack:
        steppers: dict[str, Stepper] = {}

        def start(name: str, command: Callable[[Path], list[str]]) -> None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            steppers[name] = Stepper(command(folder), folder, arguments.threads)
            stack.callback(steppers[name].close)
            steppers[name].step()  # its start

        for name, gpt2_gelu in (("nanoGPT", False), ("nanoGPT with GPT-2's GELU", True)):
            setting = nanogpt.NanogptSetting(
                model=model,
                microbatch_size=batch.microbatch_size,
                accumulation=batch.accumulation,
                precision=precision,
                compiled=compiled,
                gpt2_gelu=gpt2_gelu,
            )
            start(name, partial(nanogpt.prepare, arguments.beside_nanogpt, setting))
        how = {"precision": precision, "compile": compiled}
        for name, extra in (("Lockstep", {}), ("Lockstep, determinism off", {"determinism": "off"})):
            start(name, partial(_command, model, batch, arguments, how | extra))
        rounds = [[stepper.step() for stepper in steppers.values()] for _ in range(WARM_UP + arguments.steps)]
    return dict(zip(steppers, np.array(rounds[WARM_UP:]).transpose(1, 0, 2), strict=True))


def _command(
    model: ModelConfig, batch: BatchShape, arguments: argparse.Namespace, settings: dict[str, Any], folder: Path
) -> list[str]:
    """Return the command that measures a run of this model, whose directory it makes."""
    keys = {
        "microbatch_size": batch.microbatch_size,
        "global_batch_size": batch.sequences,
        "cpu_threads": arguments.threads,
        **settings,
    }
    run = prepare(folder, model, WARM_UP + arguments.steps + 1, **keys)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={batch.ranks}"]
    script = Path(__file__).with_name("measured_run.py")
    return [sys.executable, *(launcher if batch.ranks > 1 else []), str(script), str(run), str(folder / RESULT)]


def _measure(model: ModelConfig, batch: BatchShape, kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what benchmarks/measured_run.py says of this model. Raises BadInput where it fails."""
    settings = {**_settings(arguments), "parallel": kind}
    with tempfile.TemporaryDirectory() as name:
        command = _command(model, batch, arguments, settings, Path(name))
        command += ["--memory", f"--seconds={SECONDS}", *(["--kernels"] if arguments.kernels else [])]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
        if done.returncode:
            raise BadInput(f"the measurement failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return json.loads((Path(name) / RESULT).read_text())


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {key: _value(text) for key, text in (setting.split("=", 1) for setting in arguments.set)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # a bare word


def _cell(values: np.ndarray, digits: int = 0) -> str:
    """Return the medians of (steps, 2) values by wall clock and by CPU seconds."""
    wall, cpu = np.median(values, axis=0)
    return f"{wall:,.{digits}f} ({cpu:,.{digits}f})"


def _share(flops: float, of: float | None) -> str:
    return "unknown: no published peak of this hardware" if of is None else f"{flops / of:.1%}"


if __name__ == "__main__":
    main()
