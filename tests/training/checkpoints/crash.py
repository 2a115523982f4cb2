"""train.py that kills itself at a named point of a save. The environment says what happens:

CRASH_AT        the point, one of CRASH_POINTS; without it nothing is killed
CRASH_SAVE      at which save, from 1
CRASH_RANK      on which rank, by default 0
STOP_IN_STEP_2  set: be asked to stop in the validation after step 2, which leaves a checkpoint without a loss

Of all validations the one after step 4 is the best.
"""

import os
import signal
import time
from collections.abc import Callable

import train
from training.checkpoints import atomic_commit
from training.parallel.process_group import Ranks
from training.state import StepSettings, TrainState
from training.validation import Validation

CRASH_POINTS = (
    "prepared",
    "share written",
    "hashed",
    "state written",
    "manifest written",
    "old one aside",
    "renamed",
    "durable",
    "latest made",
    "latest moved",
    "best made",
    "best moved",
    "deletion hidden",
    "deleted",
)  # of a save, in order
BEST_STEP = 4

measure = Validation.measure
saves = []


def measured(
    self: Validation, state: TrainState, settings: StepSettings, ranks: Ranks, stopping: Callable[[], bool]
) -> float | None:
    step = state.position.step
    if step == 2 and "STOP_IN_STEP_2" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
        while not stopping():  # the signal is heard by another thread
            time.sleep(0.01)
    loss = measure(self, state, settings, ranks, stopping)
    return loss + 10 if step > BEST_STEP and loss is not None else loss


def reached(point: str) -> None:
    assert point in CRASH_POINTS, point
    rank = os.environ.get("RANK", "0")
    saves.extend([point] if point == ("prepared" if rank == "0" else "share written") else [])
    here = point == os.environ.get("CRASH_AT") and rank == os.environ.get("CRASH_RANK", "0")
    if here and len(saves) >= int(os.environ["CRASH_SAVE"]):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Validation.measure = measured
    atomic_commit.reached = reached
    train.leave(train.main())
