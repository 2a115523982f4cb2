"""Muon beside AdamW at equal tokens: one small network on real text, each at the best of its own learning rates.

python benchmarks/optimizers.py [--tokens DIR] [--layers 4] [--width 128] [--steps 250]

Text: this Python's library sources as bytes, unless a directory of token files is given. Batches, schedule, weight
decay and seed are the same for all. A sweep tries learning rates that double, goes on where the best one lies at an
end, and then tries two between it and its neighbours. The best of each is trained from two more seeds. About ten
minutes on two CPU cores.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import attrs
import torch

from training.batch_finder.worker import take_steps
from training.build import make_network, make_settings, make_state
from training.config.batch_plan import make_plan
from training.config.train_config import load_run
from training.exactness.fingerprint import resolve_numerics
from training.exactness.levels import set_determinism
from training.hardware.environment import cpu_name, git_commit
from training.optimizers.optimizer_registry import OPTIMIZERS
from training.parallel.process_group import start, stop
from training.state import StepSettings, TrainState
from training.telemetry.metrics_log import read_metrics

ROOT = Path(__file__).parents[1]
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


def main() -> None:
    """Train everything and print the table."""
    arguments = _parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.tokens is None:
            arguments.tokens = _prepare(folder)
        losses = _compare(folder, arguments)
        seconds = _step_seconds(folder, arguments)
    print(f"{cpu_name() or 'CPU'}, torch {torch.__version__}, commit {git_commit()}")
    print(f"command: {' '.join(sys.argv)}")
    print(f"| optimizer | learning rate | {' | '.join(f'seed {seed}' for seed in SEEDS)} | mean |")
    print("|---|---|" + "---|" * (len(SEEDS) + 1))
    for (optimizer, rate), seeds in sorted(losses.items()):
        mean = f"{statistics.fmean(seeds.values()):.4f}" if len(seeds) == len(SEEDS) else ""
        cells = [f"{seeds[seed]:.4f}" if seed in seeds else "" for seed in SEEDS]
        print(f"| {optimizer} | {rate:.3g} | {' | '.join(cells)} | {mean} |")
    print(f"{arguments.steps} steps of {BASE['global_batch_size'] * arguments.context:,} tokens")
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


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=Path, metavar="DIR", help="token files of another text, of bytes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32, the width of a head")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=250, help="of 16 sequences")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, on a core each")
    return parser.parse_args()


def _prepare(folder: Path) -> Path:
    options = ("--tokenizer", "bytes", "--validation-fraction", "0.03", "--split", "tail")
    _run("prepare_data.py", "stdlib", "--output", str(folder / "tokens"), *options)
    return folder / "tokens"


def _run(*command: str) -> int:
    """Run a script of the repository; return its exit status. Ends the benchmark where it is an error."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):  # 3: diverged
        sys.exit(done.stderr)
    return done.returncode


@attrs.frozen(kw_only=True)
class OptimizerSetting:
    """Keys of train.json that differ between two runs."""

    optimizer: str
    learning_rate: float
    random_seed: int


def _compare(folder: Path, arguments: argparse.Namespace) -> dict[tuple[str, float], dict[int, float]]:
    """Return final validation losses by optimizer, learning rate and seed."""
    losses: dict[tuple[str, float], dict[int, float]] = {}

    def train_all(optimizer: str, seeds: list[int], rates: list[float]) -> list[float]:
        settings = [
            OptimizerSetting(optimizer=optimizer, learning_rate=rate, random_seed=seed)
            for seed in seeds
            for rate in rates
        ]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            return list(pool.map(partial(_train, folder, arguments), settings))

    for optimizer in OPTIMIZERS:
        swept = sweep(partial(train_all, optimizer, [SEEDS[0]]), FIRST_RATES)
        losses |= {(optimizer, rate): {SEEDS[0]: loss} for rate, loss in swept.items()}
        best = min(swept, key=swept.__getitem__)
        others = train_all(optimizer, list(SEEDS[1:]), [best])
        losses[optimizer, best] |= dict(zip(SEEDS[1:], others, strict=True))
    return losses


def _train(folder: Path, arguments: argparse.Namespace, setting: OptimizerSetting) -> float:
    """Return the validation loss at the end of a run; infinite where it diverged."""
    run = _write_run(folder, arguments, **attrs.asdict(setting))
    if _run("train.py", str(run), "--device", "cpu"):
        return math.inf
    validated = [record for record in read_metrics(run) if "validation_loss" in record]
    loss: float = validated[-1]["validation_loss"]
    print(f"{setting}: {loss:.4f}", file=sys.stderr)
    return loss


def _write_run(folder: Path, arguments: argparse.Namespace, **train: Any) -> Path:
    run = folder / "-".join(str(value) for value in train.values())
    run.mkdir()
    tokens = arguments.steps * BASE["global_batch_size"] * arguments.context
    intervals = {"checkpoint_interval": arguments.steps, "validation_interval": arguments.steps}
    model = {
        "vocab_size": 257,  # of prepare_data.py --tokenizer bytes
        "context_length": arguments.context,
        "emb_dim": arguments.width,
        "n_heads": arguments.width // 32,
        "n_layers": arguments.layers,
        "qkv_bias": True,
        "tie_weights": True,
    }
    keys = BASE | intervals | {"dataset": str(arguments.tokens), "min_train_tokens": tokens} | train
    (run / "model.json").write_text(json.dumps(model))
    (run / "train.json").write_text(json.dumps(keys))
    return run


def _step_seconds(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the median CPU seconds of a step with each optimizer: steps in turn, in this process."""
    ranks = start("cpu", 60)
    built: dict[str, tuple[TrainState, StepSettings]] = {}
    for optimizer in OPTIMIZERS:
        run = load_run(_write_run(folder, arguments, optimizer=optimizer), [])
        plan = make_plan(run.train, run.model.context_length, 1)
        numerics = resolve_numerics(run, plan, ranks)
        set_determinism(numerics.determinism, run.train.execution.cpu_threads, ranks)
        state = make_state(make_network(run), run, plan, numerics, ranks)
        built[optimizer] = state, make_settings(run, plan, numerics)
    seconds: dict[str, list[float]] = {optimizer: [] for optimizer in OPTIMIZERS}
    for _ in range(WARM_UP + TIMED_STEPS):
        for optimizer, (state, settings) in built.items():
            seconds[optimizer].append(_cpu_seconds(partial(take_steps, state, settings, ranks, 1)))
    stop()
    return {optimizer: statistics.median(values[WARM_UP:]) for optimizer, values in seconds.items()}


def _cpu_seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
