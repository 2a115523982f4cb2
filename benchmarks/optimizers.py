"""Muon beside AdamW at equal tokens: one small network on real text, each at the best of its own learning rates.

python benchmarks/optimizers.py [--tokens DIR] [--layers 4] [--width 128] [--steps 250]

Text: this Python's library sources as bytes, unless a directory of token files is given. Batches, schedule, weight
decay and seed are the same for all. A sweep tries learning rates that double, goes on where the best one lies at an
end, and then tries two between it and its neighbors. The best of each is trained from two more seeds. About ten
minutes on two CPU cores.
"""

import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import command
import torch
from cyclopts import Parameter
from random_run import build, write_run

from common.errors import EXIT_DIVERGED, EXIT_DONE
from training.batch_finder.worker import take_steps
from training.config.train_config import load_run
from training.hardware.environment import cpu_name, git_commit
from training.optimizers.optimizer_registry import OPTIMIZERS
from training.parallel.process_group import start, stop
from training.telemetry.metrics_log import read_metrics

FIRST_RATES = (0.002, 0.004, 0.008)
SEEDS = (42, 43, 44)  # the first one is the sweep's
WARM_UP, TIMED_STEPS = 2, 20
BASE: dict[str, Any] = {
    "microbatch_size": 16,
    "global_batch_size": 16,
    "shuffle": True,
    "schedule_learning_rate": True,
    "warmup_period_percent": 10,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "clipping_max_norm": 1.0,
    "validation_sequences": 512,
    "log_interval": 50,
}


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class OptimizerBenchmark:
    """Command-line options."""

    tokens: Path | None = None
    """token files of another text, of bytes"""
    layers: int = 4
    width: int = 128
    """a multiple of 32, the width of a head"""
    context: int = 128
    steps: int = 250
    """of 16 sequences"""
    jobs: int = 2
    """runs at a time, on a core each"""


def main(options: OptimizerBenchmark = OptimizerBenchmark()) -> None:
    """Train everything and print the table."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        if options.tokens is None:
            command.call("prepare_data.py", "stdlib", "--output", folder / "tokens", *command.BYTES)
            options = attrs.evolve(options, tokens=folder / "tokens")
        losses = _compare(folder, options)
        seconds = _step_seconds(folder, options)
    print(f"{cpu_name() or 'CPU'}, torch {torch.__version__}, commit {git_commit()}")
    print(f"command: {' '.join(sys.argv)}")
    rows = []
    for (optimizer, rate), seeds in sorted(losses.items()):
        mean = f"{fmean(seeds.values()):.4f}" if len(seeds) == len(SEEDS) else ""
        cells = [f"{seeds[seed]:.4f}" if seed in seeds else "" for seed in SEEDS]
        rows.append([optimizer, f"{rate:.3g}", *cells, mean])
    columns = ["optimizer", "learning rate", *(f"seed {seed}" for seed in SEEDS), "mean"]
    print(command.table(columns, rows, "pipe"))
    print(f"{options.steps} steps of {BASE['global_batch_size'] * options.context:,} tokens")
    listed = ", ".join(f"{optimizer} {value:.4f}" for optimizer, value in seconds.items())
    print(f"CPU seconds of a step: {listed}; ratio {seconds['muon'] / seconds['adamw']:.3f}")


def sweep(measure: Callable[[list[float]], list[float]], first: tuple[float, ...]) -> dict[float, float]:
    """Return the loss of each learning rate that was tried: on either side of the best one a worse one, sqrt(2) away.

    `measure` returns the losses of several rates; `first` are the ones to begin with, each twice the one before.
    """
    losses = dict(zip(first, measure(list(first)), strict=True))

    def missing(factor: float) -> list[float]:
        best = min(losses, key=losses.__getitem__)
        return [rate for rate in (best / factor, best * factor) if not any(math.isclose(rate, one) for one in losses)]

    for factor in (2.0, math.sqrt(2.0)):
        while rates := missing(factor):
            losses |= dict(zip(rates, measure(rates), strict=True))
    return losses


def _compare(folder: Path, options: OptimizerBenchmark) -> dict[tuple[str, float], dict[int, float]]:
    """Return final validation losses by optimizer, learning rate and seed."""
    losses: dict[tuple[str, float], dict[int, float]] = {}

    def train_all(optimizer: str, seeds: tuple[int, ...], rates: list[float]) -> list[float]:
        keys = [
            {"optimizer": optimizer, "learning_rate": rate, "random_seed": seed} for seed in seeds for rate in rates
        ]
        with ThreadPoolExecutor(options.jobs) as pool:
            return list(pool.map(partial(_train, folder, options), keys))

    for optimizer in OPTIMIZERS:
        swept = sweep(partial(train_all, optimizer, SEEDS[:1]), FIRST_RATES)
        losses |= {(optimizer, rate): {SEEDS[0]: loss} for rate, loss in swept.items()}
        best = min(swept, key=swept.__getitem__)
        others = train_all(optimizer, SEEDS[1:], [best])
        losses[optimizer, best] |= dict(zip(SEEDS[1:], others, strict=True))
    return losses


def _train(folder: Path, options: OptimizerBenchmark, keys: dict[str, Any]) -> float:
    """Return the validation loss at the end of a run; infinite where it diverged."""
    run = _write(folder, options, keys)
    if command.call("train.py", run, "--device", "cpu", statuses=(EXIT_DONE, EXIT_DIVERGED)):
        return math.inf
    loss: float = [record["validation_loss"] for record in read_metrics(run) if "validation_loss" in record][-1]
    print(f"{keys}: {loss:.4f}", file=sys.stderr)
    return loss


def _write(folder: Path, options: OptimizerBenchmark, keys: dict[str, Any]) -> Path:
    """Write a run directory named by the keys of train.json that differ between two runs."""
    model = {
        "vocab_size": 257,  # of prepare_data.py --tokenizer bytes
        "context_length": options.context,
        "emb_dim": options.width,
        "n_heads": options.width // 32,
        "n_layers": options.layers,
        "qkv_bias": True,
        "tie_weights": True,
    }
    tokens = options.steps * BASE["global_batch_size"] * options.context
    intervals = {"checkpoint_interval": options.steps, "validation_interval": options.steps}
    train = BASE | intervals | {"dataset": str(options.tokens), "min_train_tokens": tokens} | keys
    return write_run(folder / "-".join(map(str, keys.values())), model, train)


def _step_seconds(folder: Path, options: OptimizerBenchmark) -> dict[str, float]:
    """Return the median CPU seconds of a step with each optimizer: steps in turn, in this process."""
    ranks = start("cpu", 60)
    runs = {name: load_run(_write(folder, options, {"optimizer": name}), []) for name in OPTIMIZERS}
    built = {name: build(run, ranks) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    for _ in range(WARM_UP + TIMED_STEPS):
        for name, (state, settings) in built.items():
            began = time.process_time()
            take_steps(state, settings, ranks, 1)
            seconds[name].append(time.process_time() - began)
    stop()
    return {name: median(values[WARM_UP:]) for name, values in seconds.items()}


if __name__ == "__main__":
    command.run(main)
