"""A version of train.py that kills itself during a save, just before a call to the file system.

Environment variables:

CRASH_AT        the call before which the process is killed, one of CALLS; if unset, no process is killed
CRASH_SAVE      the number of the save during which this happens, counted from 1 in each process
CRASH_RANK      the rank that is killed; the default is 0
STOP_IN_STEP_2  if set, the process gets SIGTERM during the validation after step 2, and saves a checkpoint without a
                validation loss

The validation loss is best after step 4, because 10 is added to every later validation loss.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable

import train
from training.parallel.process_group import Ranks
from training.state import StepSettings, TrainState
from training.validation import Validation

CALLS = {  # a save's calls in order; each pattern matches an audit event of Python and its first arguments
    "make folder": r"os\.mkdir .*/\.partial-step-\d+ ",
    "make file": r"open .*/\.partial-step-\d+/optimizer.safetensors wb?$",
    "write weights": r"open .*/\.partial-step-\d+/model.safetensors r\+b?$",
    "write moments": r"open .*/\.partial-step-\d+/optimizer.safetensors r\+b?$",
    "read back": r"open .*/\.partial-step-\d+/model.safetensors rb?$",
    "write state": r"open .*/\.partial-step-\d+/state.json wb?$",
    "write manifest": r"open .*/\.partial-step-\d+/manifest.json wb?$",
    "replace": r"os\.rename .*/\.partial-step-\d+ .*/step-\d+$",  # by then, the older checkpoint has been renamed
    "publish": r"os\.rename .*/\.partial-step-\d+ .*/step-\d+$",
    "make latest": r"os\.symlink .*/\.partial-latest$",
    "move latest": r"os\.rename .*/\.partial-latest ",
    "make best": r"os\.symlink .*/\.partial-best$",
    "move best": r"os\.rename .*/\.partial-best ",
    "hide old one": r"os\.rename .*/step-\d+ .*/\.partial-step-\d+$",
    "delete old one": r"shutil\.rmtree .*/\.partial-step-\d+( |$)",
}
EVENTS = {pattern.partition(" ")[0].replace("\\", "") for pattern in CALLS.values()}
BEST_STEP = 4

measure = Validation.measure
saves: set[str] = set()


def measured(
    self: Validation, state: TrainState, settings: StepSettings, ranks: Ranks, stopping: Callable[[], bool]
) -> float | None:
    step = state.position.step
    if step == 2 and "STOP_IN_STEP_2" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
        while not stopping():  # another thread receives the signal
            time.sleep(0.01)
    loss = measure(self, state, settings, ranks, stopping)
    return loss + 10 if step > BEST_STEP and loss is not None else loss


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if event not in EVENTS:
        return
    call = " ".join([event, *map(str, arguments[:2])])
    saves.update(re.findall(r"/\.partial-(step-\d+)", call))
    if len(saves) >= int(os.environ["CRASH_SAVE"]) and re.match(CALLS[os.environ["CRASH_AT"]], call):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Validation.measure = measured
    if "CRASH_AT" in os.environ and os.environ.get("RANK", "0") == os.environ.get("CRASH_RANK", "0"):
        sys.addaudithook(watch)
    train.leave(train.main())
