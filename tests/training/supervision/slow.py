"""train.py with slow phases, so that a signal or a kill surely falls into one of them.

The environment gives seconds: SLOW_START before a checkpoint is looked for, SLOW_STEP, SLOW_VALIDATION for each of its
batches, SLOW_SAVE before a save's files are written. In a slow start each rank makes the file `waiting-RANK`.
"""

import os
import time
from pathlib import Path
from typing import Any

import train
from training import build, loop, validation
from training.checkpoints import crash_points
from training.job import Job

plain_resume, plain_step, plain_read = build._resume, loop.train_step, validation.read_windows


def wait(name: str) -> None:
    time.sleep(float(os.environ.get(name, "0")))


def resume(job: Job, *others: Any) -> Any:
    if "SLOW_START" in os.environ:
        Path(job.run.directory / f"waiting-{os.environ.get('RANK', '0')}").touch()
    wait("SLOW_START")
    return plain_resume(job, *others)


def step(*arguments: Any) -> Any:
    wait("SLOW_STEP")
    return plain_step(*arguments)


def read(*arguments: Any) -> Any:
    wait("SLOW_VALIDATION")
    return plain_read(*arguments)


def reached(point: str) -> None:
    if point == "prepared":
        wait("SLOW_SAVE")


build._resume, loop.train_step, validation.read_windows, crash_points.reached = resume, step, read, reached
train.leave(train.main())
