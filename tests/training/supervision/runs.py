"""Runs that tests stop, kill and disturb: started with slow phases, waited for, compared."""

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


def start(run: Path, ranks: int, *options: str, **how: Any) -> Any:
    """Start a run with steps of 10 ms at least. `how`: seconds by slow.py's names, `start_training`'s keywords."""
    slow = {name: str(how.pop(name)) for name in list(how) if name.isupper()}
    return start_training(run, *options, ranks=ranks, script=SLOW, environment={"SLOW_STEP": "0.01"} | slow, **how)


def exit_of(run: Path) -> JobExit:
    """Return the exit record of a run, whose reason is one of the list."""
    ended = read_exit(run)
    assert ended is not None and ended.reason in REASONS
    return ended


def outcome(run: Path) -> str:
    return exit_of(run).outcome


def wait_for_step(run: Path, step: int, process: Any) -> None:
    wait_until(lambda: any(logged >= step for logged in metrics(run, "train_loss")), process)


def assert_same_weights(first: Path, second: Path) -> None:
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(run / "checkpoints" / "latest" / file) for run in (first, second))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
