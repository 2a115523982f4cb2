#!/usr/bin/env python3
"""Cost of exactness: step time, traffic and memory of determinism elastic against off, and checkpoint stalls.

`python benchmarks/exactness.py [--ranks 2 4] [--steps 16]` trains one small GPT-2 on random tokens under each level and
wrapper, in turn and twice, and prints a table of medians. Runs on a CPU under gloo, on GPUs under NCCL. Bytes are those
that one rank sends in a step: measured on the loopback device, which carries gloo's alone.
"""

import argparse
import platform
import statistics
import tempfile
from pathlib import Path

import random_run

from model.config import ModelConfig, parameter_count

MODEL = ModelConfig(vocab_size=4096, context_length=128, emb_dim=384, n_heads=6, n_layers=6, tie_weights=True)
GLOBAL_BATCH = 8
WARMUP_STEPS = 5
ROUNDS = 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    parameters = parameter_count(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        run = random_run.prepare(
            Path(folder),
            MODEL,
            arguments.steps,
            microbatch_size=1,
            global_batch_size=GLOBAL_BATCH,
            checkpoint_interval=arguments.steps // 2,
        )
        print(f"{parameters:,} parameters, fp32 gradients of {4 * parameters / 2**20:.1f} MiB; {platform.machine()}")
        print("ranks  wrapper  level    ms a step  against off  MiB sent  peak MiB  ms a save")
        for ranks in arguments.ranks:
            for parallel in ("ddp", "fsdp"):
                compare(run, ranks, parallel, arguments.steps)


def compare(run: Path, ranks: int, parallel: str, steps: int) -> None:
    """Print a line for each level: medians over rounds, the levels in turn."""
    results: dict[str, list[dict[str, float]]] = {"off": [], "elastic": []}
    for _ in range(ROUNDS):
        for level, measured in results.items():
            measured.append(measure(run, ranks, parallel, level, steps))
    medians = {
        level: {key: statistics.median(result[key] for result in measured) for key in measured[0]}
        for level, measured in results.items()
    }
    for level, median in medians.items():
        ratio = median["step"] / medians["off"]["step"]
        print(
            f"{ranks:5}  {parallel:7}  {level:7}  {1000 * median['step']:9.1f}  {ratio:11.2f}  {median['sent']:8.1f}  "
            f"{median['memory']:8.0f}  {1000 * median['save']:9.1f}",
            flush=True,
        )


def measure(run: Path, ranks: int, parallel: str, level: str, steps: int) -> dict[str, float]:
    """Train the run; return seconds a step and a save, MiB a rank sends in a step, and the peak memory in MiB."""
    records, sent = random_run.train(run, ranks, parallel=parallel, determinism=level)
    seconds = random_run.seconds_by_step(records, GLOBAL_BATCH * MODEL.context_length)
    return {
        "step": statistics.median(value for step, value in seconds.items() if step > WARMUP_STEPS),
        "sent": float("nan") if sent is None else sent / 2**20,
        "memory": max(record["peak_memory_bytes"] for record in records if "train_loss" in record) / 2**20,
        "save": statistics.median(save["stall_seconds"] for save in random_run.saves(records, steps)),
    }


if __name__ == "__main__":
    main()
