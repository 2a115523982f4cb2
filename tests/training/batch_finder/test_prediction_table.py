"""find_batch_size.py --predict: a table without a GPU and without tokens."""

import re
from collections.abc import Callable
from pathlib import Path

from tests import launch
from tests.conftest import ROOT
from training.batch_finder.prediction_table import prediction_table
from training.config.train_config import load_run
from training.hardware.gpus import known_gpus


def test_predictions_need_no_gpu_and_no_tokens() -> None:
    command = ["--predict", "a100-40gb,rtx3090-24gb", "--world-size", "8", "--set", "model.n_layers=48"]
    done = launch.run(
        ROOT / "find_batch_size.py",
        str(ROOT / "runs" / "8xa100"),
        *command,
        "--set",
        "model.emb_dim=1600",
        "--set",
        "model.n_heads=25",
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["a100-40gb", "37.4", "ddp"] in [row[:3] for row in rows]
    assert "rtx3090-24gb, ddp: not even one sequence fits; predicted to fit: --set parallel=fsdp, or" in (done.stdout)
    assert "calibrated on torch's allocator, not on a card" in done.stdout


def test_a_small_model_is_told_in_mib(make_run: Callable[..., Path]) -> None:
    run = load_run(make_run(), [])
    first, *_ = prediction_table(run.model, run.train, [known_gpus()["l4"]], 1)
    assert re.search(r"ddp, MiB: weights 0\.\d*[1-9]", first), first
