"""A version of train.py with slow phases, so that a signal or a kill reliably arrives during one of them.

Environment variables set the delays in seconds: SLOW_START before the search for a checkpoint, SLOW_STEP before each
step, SLOW_VALIDATION before each batch of a validation, and SLOW_SAVE before the files of a save are written. During a
slow start, each rank creates the file `waiting-RANK`.
"""

import os
import time
from pathlib import Path
from typing import Any

import train
from training import job, loop, validation
from training.checkpoints.tensor_files import StateShard
from training.resume import ResumeRequest

plain_resume, plain_step, plain_read = job.resume, loop.train_step, validation.read_windows
plain_write = StateShard.write


def wait(name: str) -> None:
    time.sleep(float(os.environ.get(name, "0")))


def resume(request: ResumeRequest, *arguments: Any) -> Any:
    if "SLOW_START" in os.environ:
        Path(request.directory / f"waiting-{os.environ.get('RANK', '0')}").touch()
    wait("SLOW_START")
    return plain_resume(request, *arguments)


def step(*arguments: Any) -> Any:
    wait("SLOW_STEP")
    return plain_step(*arguments)


def read(*arguments: Any) -> Any:
    wait("SLOW_VALIDATION")
    return plain_read(*arguments)


def write(*arguments: Any) -> Any:
    wait("SLOW_SAVE")
    return plain_write(*arguments)


job.resume, loop.train_step, validation.read_windows = resume, step, read
StateShard.write = write  # type: ignore[method-assign]
train.leave(train.main())
