#!/usr/bin/env python3
"""What exactness costs: step time, bytes and memory of elastic against off, and what a checkpoint stalls.

`python benchmarks/exactness.py [--ranks 2 4] [--steps 16]` trains one small GPT-2 on random tokens under each level and
wrapper, in turn and twice, and prints a table of medians. Runs on a CPU under gloo, on GPUs under NCCL. Bytes are those
that one rank sends for gradients in a step, by arithmetic.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from model.config import ModelConfig, parameter_count  # noqa: E402  # after the path to them

MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "context_length": 128,
    "emb_dim": 384,
    "n_heads": 6,
    "n_layers": 6,
    "tie_weights": True,
}
WARMUP_STEPS = 5
ROUNDS = 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    parameters = parameter_count(ModelConfig(**MODEL))
    with tempfile.TemporaryDirectory() as folder:
        runs = prepare(Path(folder), arguments.steps)
        print(f"{parameters:,} parameters, fp32 gradients of {4 * parameters / 2**20:.1f} MiB; {platform.machine()}")
        print("ranks  wrapper  level    ms a step  against off  MiB sent  peak MiB  ms a save")
        for ranks in arguments.ranks:
            for parallel in ("ddp", "fsdp"):
                compare(runs, ranks, parallel, parameters)


def prepare(folder: Path, steps: int) -> Path:
    """Write token files and a run directory; return the latter."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, MODEL["vocab_size"], 8 * 128 * (steps + 2), dtype=np.uint16)
    (folder / "tokens").mkdir()
    save_file({"tokens": tokens}, folder / "tokens" / "train.safetensors")
    run = folder / "run"
    run.mkdir()
    (run / "model.json").write_text(json.dumps(MODEL))
    train = {
        "dataset": str(folder / "tokens"),
        "min_train_tokens": 8 * 128 * steps,
        "microbatch_size": 1,
        "global_batch_size": 8,
        "clipping_max_norm": 1.0,
        "validation_interval": None,
        "checkpoint_interval": steps // 2,
        "log_interval": 1,
    }
    (run / "train.json").write_text(json.dumps(train))
    return run


def compare(run: Path, ranks: int, parallel: str, parameters: int) -> None:
    """Print a line for each level: medians over rounds, the levels in turn."""
    results: dict[str, list[dict[str, float]]] = {"off": [], "elastic": []}
    for _ in range(ROUNDS):
        for level, measured in results.items():
            measured.append(measure(run, ranks, parallel, level))
    medians = {
        level: {key: statistics.median(result[key] for result in measured) for key in measured[0]}
        for level, measured in results.items()
    }
    # A ring all-reduce sends 2 (W - 1) / W of the gradient, as all-to-all with all-gather does; FSDP's half of it.
    sent = (2 if parallel == "ddp" else 1) * (ranks - 1) / ranks * 4 * parameters / 2**20
    for level, median in medians.items():
        ratio = median["step"] / medians["off"]["step"]
        print(
            f"{ranks:5}  {parallel:7}  {level:7}  {1000 * median['step']:9.1f}  {ratio:11.2f}  {sent:8.1f}  "
            f"{median['memory']:8.0f}  {1000 * median['save']:9.0f}"
        )


def measure(run: Path, ranks: int, parallel: str, level: str) -> dict[str, float]:
    """Train the run; return seconds a step and a save, and the peak memory in MiB."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "train.py"]
    options = ["--resume", "never", "--set", f"parallel={parallel}", "--set", f"determinism={level}"]
    done = subprocess.run([*command, str(run), *options], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "train_loss" in record]
    tokens = 8 * 128
    return {
        "step": statistics.median(tokens / record["tokens_per_second"] for record in steps[WARMUP_STEPS:]),
        "memory": max(record["peak_memory_bytes"] for record in steps) / 2**20,
        "save": statistics.median(record["stall_seconds"] for record in records if record.get("event") == "checkpoint"),
    }


if __name__ == "__main__":
    main()
