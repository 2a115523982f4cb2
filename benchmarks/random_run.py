"""Training benchmarks' run directory over random tokens, trained by train.py, and its metrics."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from command import ROOT
from process_tree import kill_tree
from safetensors.numpy import save_file

from common.errors import BadInput
from model.config import ModelConfig
from training.build import make_network, make_settings, make_state
from training.config.batch_plan import make_plan
from training.config.train_config import Run
from training.exactness.fingerprint import resolve_numerics
from training.exactness.levels import set_determinism
from training.initial_weights import start_random
from training.parallel.process_group import Ranks
from training.state import StepSettings, TrainState
from training.telemetry.metrics_log import METRICS, read_metrics

POLL_SECONDS = 0.005
BASE: dict[str, Any] = {"clipping_max_norm": 1.0, "validation_interval": None, "log_interval": 1}


def prepare(folder: Path, model: ModelConfig, steps: int, **train: Any) -> Path:
    """Write random token files for a number of steps, and a run directory; return that. `train`: keys of train.json."""
    count = steps * train["global_batch_size"] * model.context_length
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, count + 1, dtype=np.uint16)
    return write_run_over(tokens, folder, model, min_train_tokens=count, **train)


def write_run_over(tokens: npt.NDArray[np.uint16], folder: Path, model: ModelConfig, **train: Any) -> Path:
    """Write a token file and a run directory over it; return the latter."""
    (folder / "tokens").mkdir(parents=True)
    save_file({"tokens": tokens}, folder / "tokens" / "train.safetensors")
    return write_run(folder / "run", attrs.asdict(model), BASE | {"dataset": str(folder / "tokens")} | train)


def write_run(run: Path, model: dict[str, Any], train: dict[str, Any]) -> Path:
    """Write a run directory, and return it."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "model.json").write_text(json.dumps(model))
    (run / "train.json").write_text(json.dumps(train))
    return run


def launcher(ranks: int) -> list[str]:
    """Return the beginning of a command: Python, under torchrun on several ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else [])]


def train(
    run: Path, ranks: int, *settings: str, kill_after: int | None = None
) -> tuple[list[dict[str, Any]], float | None]:
    """Train the run from the start; return its metrics, and the bytes each rank sent per step over the loopback device.

    `settings`: KEY=VALUE of train.json. `kill_after`: a logged step; the run is killed once that is in the metrics, so
    that the last step's checkpoint costs neither time nor disk. The bytes are None if fewer than three steps were
    seen, or without such a device; on GPUs NCCL avoids it. Raises BadInput where training fails.
    """
    options = [f"--set={setting}" for setting in settings]
    command = [*launcher(ranks), "train.py", str(run), "--resume", "never", *options]
    seen: list[tuple[int, int]] = []  # step, bytes sent by all until then
    began, killed = time.time(), False
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        file = run / METRICS
        if file.exists() and file.stat().st_mtime >= began:
            step = max((record["step"] for record in read_metrics(run) if "train_loss" in record), default=0)
            if step > (seen[-1][0] if seen else 0):
                seen.append((step, loopback_bytes()))
            if kill_after is not None and step >= kill_after:
                kill_tree(process)
                killed = True
        time.sleep(POLL_SECONDS)
    if process.returncode and not killed:
        raise BadInput(f"train.py failed: {process.communicate()[1][-4000:]}")
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


def peak_memory(records: list[dict[str, Any]]) -> int:
    """Return the peak memory of rank 0 in bytes."""
    return max(record["peak_memory_bytes"] for record in records if "train_loss" in record)


def saves(records: list[dict[str, Any]], before_step: int) -> list[dict[str, Any]]:
    """Return the saves before a step: the stall of a run's last save includes the disk, so it is left out."""
    return [record for record in records if record.get("event") == "checkpoint" and record["step"] < before_step]


def build(run: Run, ranks: Ranks) -> tuple[TrainState, StepSettings]:
    """Return the training state of a run in this process, and the settings of its steps."""
    plan = make_plan(run.train, run.model.context_length, ranks.world_size)
    numerics = resolve_numerics(run.train, ranks.device)
    set_determinism(numerics.determinism, run.train.execution.cpu_threads, ranks)
    state = make_state(make_network(run.model), run.train, plan, numerics, ranks)
    start_random(state, run.train.random_seed)
    return state, make_settings(run.train, plan, numerics)
