"""Script around train.py: the host's waits for the GPU, and copies that make it wait, in steps of the training loop."""

import sys
from typing import Any

import train
from tools.fakegpu.recorder import record
from training import loop

FIRST, LAST = 15, 114  # counted from 0; DDP measures itself, and waits, in its first ten, and else in each 100th
train_step = loop.train_step
open_recordings: list[Any] = []


def recorded_step(state: Any, settings: Any, step: int, next_batch: Any) -> Any:
    """Begin or end the recording before the step of that number."""
    if step == FIRST:
        open_recordings.append(record())
        recording = open_recordings[0].__enter__()
        open_recordings.append(recording)
    elif step == LAST + 1:
        open_recordings[0].__exit__(None, None, None)
        recording = open_recordings[1]
        pageable = [name for name in recording.copies if "pageable" in name]
        print(f"waits: {dict(recording.synchronizations)}, pageable copies: {pageable}", flush=True)
        seconds = state.parallel.clock.totals
        most = 0.9e-3 * seconds.steps  # between two emulated events lies a millisecond
        work = "own work in each" if seconds.own > most else seconds
        print(f"timed: {seconds.steps} steps, {work}", flush=True)
    return train_step(state, settings, step, next_batch)


loop.train_step = recorded_step
sys.argv[0] = "train.py"
train.leave(train.main())
