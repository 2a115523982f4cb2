"""Helpers for runs that tests stop, kill or disturb: start a run with slow phases, wait for a step, compare weights."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common.errors import REASONS
from tests.conftest import metrics, start_training
from tests.launch import wait_until
from training.supervision.run_lock import JobExit, read_exit

SLOW = Path(__file__).with_name("slow.py")
LONG = {"min_train_tokens": 200 * 8 * 32, "log_interval": 1, "validation_interval": None, "checkpoint_interval": 50}


def start(run: Path, ranks: int, *options: str, **keywords: Any) -> Any:
    """Start a run with steps of at least 10 ms.

    `keywords` are the delays of slow.py in seconds, such as SLOW_SAVE=1.5, and keyword arguments of `start_training`.
    """
    slow = {name: str(keywords.pop(name)) for name in list(keywords) if name.isupper()}
    return start_training(run, *options, ranks=ranks, script=SLOW, environment={"SLOW_STEP": "0.01"} | slow, **keywords)


def exit_of(run: Path) -> JobExit:
    """Return the exit record of a run, after checking that its reason is in REASONS."""
    job_exit = read_exit(run)
    assert job_exit is not None and job_exit.reason in REASONS
    return job_exit


def outcome(run: Path) -> str:
    return exit_of(run).outcome


def wait_for_step(run: Path, step: int, process: Any) -> None:
    wait_until(lambda: any(logged >= step for logged in metrics(run, "train_loss")), process)


def assert_same_weights(first: Path, second: Path) -> None:
    for file in ("model.safetensors", "optimizer.safetensors"):
        tensors_1, tensors_2 = (load_file(run / "checkpoints" / "latest" / file) for run in (first, second))
        assert all(torch.equal(tensors_1[name], tensors_2[name]) for name in tensors_1 | tensors_2)
