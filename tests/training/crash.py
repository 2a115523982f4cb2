"""Kill a run at each named moment of a save, then let the same command finish it. Prints a JSON line for each.

usage: python tests/training/crash.py RUN DIR: RUN is copied into DIR for each moment. A child process is forked for
every start, so that torch is imported once; what it runs is train.py's own main, and the kill is a real one.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch  # noqa: F401  # once, before the forks

import train
from training import commit, validation
from training.checkpoint import find

KILLED_SAVE = 2  # the first one is there to fall back on


def start(run: Path, *options: str, prepare: Callable[[], None] = lambda: None) -> int:
    """Run train.py in a child process; return its wait status."""
    child = os.fork()
    if child == 0:
        output = os.open(run / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["train.py", str(run), "--device", "cpu", *options]
        prepare()
        train.leave(train.main())
    return os.waitpid(child, 0)[1]


def kill_at(moment: str, save: int) -> Callable[[], None]:
    """Return what arms a process to kill itself at a moment of its n-th save."""

    def prepare() -> None:
        saves = []

        def reached(now: str) -> None:
            saves.extend([now] if now == "prepared" else [])
            if now == moment and len(saves) >= save:
                os.kill(os.getpid(), signal.SIGKILL)

        commit.reached = reached

    return prepare


def stop_in_the_validation_of_step_2() -> None:
    """Arm a process to be asked to stop in its second validation: it leaves a checkpoint without a loss."""
    calls = []
    measure = validation.Validation.measure

    def measured(self: validation.Validation, *arguments: object) -> float | None:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self, *arguments)

    validation.Validation.measure = measured


def main() -> None:
    original, directory = Path(sys.argv[1]), Path(sys.argv[2])
    for moment in (None, *commit.MOMENTS):
        run = directory / str(moment).replace(" ", "-")
        shutil.copytree(original, run)
        status = None
        if moment == "old one aside":  # a checkpoint is replaced only when its validation is made up for
            status = start(run, prepare=stop_in_the_validation_of_step_2)
            assert os.waitstatus_to_exitcode(status) == 75, (run / "output").read_text()
            status = start(run, prepare=kill_at(moment, 1))
        elif moment is not None:
            status = start(run, prepare=kill_at(moment, KILLED_SAVE))
        intact = find(run, "auto") if moment is not None else None
        done = start(run)
        state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
        report = {
            "moment": moment,
            "killed_by": None if status is None else os.WTERMSIG(status),
            "intact": None if intact is None else intact.name,
            "exit": os.waitstatus_to_exitcode(done),
            "state_sha256": state["state_sha256"],
            "best": [state["best_step"], state["best_validation_loss"]],
            "files": sorted(path.name for path in (run / "checkpoints").iterdir()),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
