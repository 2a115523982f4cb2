"""train.py with slow phases, so that a signal or a kill surely falls into one of them.

The environment gives seconds: SLOW_START before a checkpoint is looked for, SLOW_STEP, SLOW_VALIDATION for each of its
batches, SLOW_SAVE before a save's files are written. In a slow start each rank makes the file `waiting-RANK`.
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


def resume(request: ResumeRequest, *others: Any) -> Any:
    if "SLOW_START" in os.environ:
        Path(request.directory / f"waiting-{os.environ.get('RANK', '0')}").touch()
    wait("SLOW_START")
    return plain_resume(request, *others)


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
