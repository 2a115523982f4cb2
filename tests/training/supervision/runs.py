"""Runs that tests stop, kill and disturb: started with slow phases, waited for, compared."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests import launch
from tests.conftest import ROOT, metrics, train_command

SLOW = Path(__file__).with_name("slow.py")
LONG = {"min_train_tokens": 200 * 8 * 32, "log_interval": 1, "validation_interval": None, "checkpoint_interval": 50}


def start(
    run: Path,
    ranks: int,
    *options: str,
    as_user: bool = False,
    torchrun: bool = False,
    file_bytes: int | None = None,
    **seconds: float,
) -> Any:
    """Start a run with steps of 10 ms at least. `seconds`: see slow.py; `file_bytes`: tests/launch.py.

    As a user does it, by a command, with torchrun for one rank, too, if asked; or else as tests/launch.py does.
    """
    slow = {name: str(value) for name, value in ({"SLOW_STEP": 0.01} | seconds).items()}
    if not as_user:
        options = ("--device", "cpu", *options)
        return launch.start(SLOW, str(run), *options, ranks=ranks, environment=slow, file_bytes=file_bytes)
    assert file_bytes is None
    command = train_command(run, *options, ranks=ranks, script=SLOW, torchrun=torchrun)
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **slow},
        start_new_session=True,  # a process group of its own, as a terminal's foreground job
    )


def outcome(run: Path) -> str:
    return str(json.loads((run / "exit.json").read_text())["outcome"])


def wait_for_step(run: Path, step: int, process: Any) -> None:
    wait_until(lambda: any(logged >= step for logged in metrics(run, "train_loss")), process)


def wait_until(reached: Callable[[], bool], process: Any) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_same_weights(first: Path, second: Path) -> None:
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(run / "checkpoints" / "latest" / file) for run in (first, second))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
