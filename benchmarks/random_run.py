"""Run directory over random tokens for training benchmarks, trained under torchrun, and its metrics."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from model.config import ModelConfig  # noqa: E402  # after the path to it
from training.telemetry.metrics_log import METRICS, read_metrics  # noqa: E402

POLL_SECONDS = 0.005
BASE: dict[str, Any] = {"clipping_max_norm": 1.0, "validation_interval": None, "log_interval": 1}


def prepare(folder: Path, model: ModelConfig, steps: int, **train: Any) -> Path:
    """Write token files for a number of steps, and a run directory; return the latter. `train`: keys of train.json."""
    count = steps * train["global_batch_size"] * model.context_length + 1
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, count, dtype=np.uint16)
    (folder / "tokens").mkdir()
    save_file({"tokens": tokens}, folder / "tokens" / "train.safetensors")
    run = folder / "run"
    run.mkdir()
    (run / "model.json").write_text(json.dumps(attrs.asdict(model)))
    (run / "train.json").write_text(json.dumps(BASE | {"dataset": str(folder / "tokens")} | train))
    return run


def train(run: Path, ranks: int, **settings: str) -> tuple[list[dict[str, Any]], float | None]:
    """Train the run from the start; return its metrics, and the bytes each rank sent per step over the loopback device.

    The bytes are None if fewer than three steps were seen, or without such a device; on GPUs NCCL avoids it.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "train.py"]
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    seen: list[tuple[int, int]] = []  # step, bytes sent by all until then
    began = time.time()
    process = subprocess.Popen(
        [*command, str(run), "--resume", "never", *options],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None:
        file = run / METRICS
        if file.exists() and file.stat().st_mtime >= began:
            step = max((record["step"] for record in read_metrics(run)), default=0)
            if step > (seen[-1][0] if seen else 0):
                seen.append((step, loopback_bytes()))
        time.sleep(POLL_SECONDS)
    if process.returncode:
        sys.exit(process.communicate()[1])
    sent = None
    if len(seen) > 2:
        (first, before), (last, after) = seen[0], seen[-1]
        sent = (after - before) / (last - first) / ranks
    return read_metrics(run), sent or None


def loopback_bytes() -> int:
    """Return the bytes sent over the loopback device since the machine started, or 0."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name == "lo":
            return int(counters.split()[8])
    return 0


def seconds_by_step(records: list[dict[str, Any]], tokens_per_step: int) -> dict[int, float]:
    """Return the seconds of each step."""
    return {
        record["step"]: tokens_per_step / record["tokens_per_second"] for record in records if "train_loss" in record
    }


def saves(records: list[dict[str, Any]], before_step: int) -> list[dict[str, Any]]:
    """Return the saves before a step: the stall of a run's last save includes the disk, so it is left out."""
    return [record for record in records if record.get("event") == "checkpoint" and record["step"] < before_step]
