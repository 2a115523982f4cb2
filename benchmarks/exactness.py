"""Cost of exactness: step time, traffic and memory of determinism elastic against off, and checkpoint stalls.

python benchmarks/exactness.py [--ranks 2 4] [--steps 16]

Trains one small GPT-2 on random tokens under each level and wrapper, in turn and twice, and prints medians. Runs on a
CPU under gloo, on GPUs under NCCL. Bytes are those that one rank sends in a step: measured on the loopback device,
which carries gloo's alone.
"""

import platform
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import command
import numpy as np
import random_run

from model.config import ModelConfig, parameter_count

MODEL = ModelConfig(vocab_size=4096, context_length=128, emb_dim=384, n_heads=6, n_layers=6, tie_weights=True)
GLOBAL_BATCH = 8
WARMUP_STEPS = 5
ROUNDS = 2
LEVELS = ("off", "elastic")
COLUMNS = ["ranks, wrapper, level", "ms a step", "against off", "MiB sent", "peak MiB", "ms a save"]


def main(*, ranks: tuple[int, ...] = (2, 4), steps: int = 16) -> None:
    """Measure and print."""
    parameters = parameter_count(MODEL)
    batch = {"microbatch_size": 1, "global_batch_size": GLOBAL_BATCH, "checkpoint_interval": steps // 2}
    rows = []
    with TemporaryDirectory() as folder:
        run = random_run.prepare(Path(folder), MODEL, steps, **batch)
        for count, parallel in product(ranks, ("ddp", "fsdp")):
            rounds = [[_costs(run, count, parallel, level) for level in LEVELS] for _ in range(ROUNDS)]
            medians = np.median(rounds, axis=0)
            for level, (step, sent, memory, save) in zip(LEVELS, medians, strict=True):
                cells = [f"{1e3 * step:.1f}", f"{step / medians[0][0]:.2f}", f"{sent:.1f}", f"{memory:.0f}"]
                rows.append([f"{count} {parallel} {level}", *cells, f"{1e3 * save:.1f}"])
    print(f"{parameters:,} parameters, fp32 gradients of {4 * parameters / 2**20:.1f} MiB; {platform.machine()}")
    print(command.table(COLUMNS, rows))


def _costs(run: Path, ranks: int, parallel: str, level: str) -> tuple[float, float, float, float]:
    """Train the run; return seconds a step, MiB a rank sends in it, the peak memory in MiB, and seconds a save."""
    records, sent = random_run.train(run, ranks, f"parallel={parallel}", f"determinism={level}")
    seconds = random_run.seconds_by_step(records, GLOBAL_BATCH * MODEL.context_length)
    return (
        median(value for step, value in seconds.items() if step > WARMUP_STEPS),
        float("nan") if sent is None else sent / 2**20,
        random_run.peak_memory(records) / 2**20,
        median(save["stall_seconds"] for save in random_run.saves(records, max(seconds))),
    )


if __name__ == "__main__":
    command.run(main)
