"""Run directories for tests. Their metrics are written directly, without any training."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import attrs

from training.config.train_config import load_run

QUICKSTART = Path("runs/quickstart")
PARTS = {"compile": 4.0, "training": 90.0, "lost": 6.0}  # seconds


def start(step: int = 0, price: float | None = 2.0, elapsed: float = 0.0) -> dict[str, Any]:
    """Return the first record of a job."""
    return {"event": "start", "step": step, "world_size": 1, "price_per_hour": price, "elapsed_seconds": elapsed}


def step(number: int, loss: float = 3.0, elapsed: float | None = None, **values: Any) -> dict[str, Any]:
    """Return the record of a logged step. Unless `elapsed` is given, a step takes one second."""
    measured = {"train_loss": loss, "learning_rate": 1e-3, "grad_norm": 0.5, "tokens_per_second": 9000.0, "mfu": None}
    return {"step": number, **measured, "elapsed_seconds": number if elapsed is None else elapsed, **values}


def training(steps: int = 100) -> list[dict[str, Any]]:
    """Return the records of a complete run with a price, a skipped spike, validations and a ledger."""
    records = [start(), *(step(at, 3 + 2 * math.exp(-at / 20)) for at in range(1, steps + 1))]
    records += [{"step": at, "validation_loss": 3.1, "elapsed_seconds": at} for at in (steps // 2, steps)]
    records += [{"event": "spike-skipped", "step": steps // 3, "reason": "<i>loss</i> 9"}]
    return [*records, {"event": "end", "step": steps, "ledger": PARTS, "run_ledger": PARTS, "elapsed_seconds": steps}]


def write_run(directory: Path, records: list[dict[str, Any]]) -> Path:
    """Write a run directory with these records and the settings of the quickstart."""
    directory.mkdir()
    for name in ("model.json", "train.json"):
        shutil.copy(QUICKSTART / name, directory)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


def write_resolved(run: Path, **changes: Any) -> Path:
    """Write a run's `resolved.json` with these changes. `model` and `train` contain only the keys that change."""
    read = load_run(run, ())
    values: dict[str, Any] = {
        "model": attrs.asdict(read.model) | changes.pop("model", {}),
        "train": read.train.flat() | changes.pop("train", {}),
        "global_batch_size": 8,
        "numerics": {"determinism": "elastic", "precision": "fp32"},
    }
    (run / "resolved.json").write_text(json.dumps(values | changes))
    return run
