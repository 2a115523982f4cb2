"""Background drawing: a process that draws the chart or the report of a run, so that no step waits for it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import attrs

LEAST_SECONDS = 10.0  # between drawings
FAILED_SECONDS = 600.0  # after a failed drawing, which printed its error
LAST_SECONDS = 300.0  # longest wait for each of the last two; one that hangs, on a dead disk for one, is left
KILL_SECONDS = 1.0  # for a killed process to be gone; one that waits for a dead disk stays
ROOT = Path(__file__).parents[2]
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # torchrun's variables: a drawing is no rank


@attrs.define(kw_only=True)
class BackgroundDrawing:
    """Draws in the background, one drawing at a time. Whatever becomes of its process, the run goes on."""

    name: str  # of what is drawn, for people
    file: Path
    arguments: list[str]  # of Python, in the root of the repository
    every_steps: int = 0  # least steps between drawings
    finish_seconds: float | None = None  # longest wait for the last drawing, then killed; None: LAST_SECONDS
    _process: "subprocess.Popen[bytes] | None" = attrs.field(init=False, default=None)
    _began: float = attrs.field(init=False, factory=time.monotonic)  # the last drawing, or this
    _step: int = attrs.field(init=False, default=0)  # of the last drawing

    def redraw(self, step: int) -> None:
        """Start a drawing unless the last one still runs or is recent."""
        status = 0 if self._process is None else self._process.poll()
        pause = LEAST_SECONDS if status == 0 else FAILED_SECONDS
        due = step >= self._step + self.every_steps and time.monotonic() >= self._began + pause
        if status is not None and due:
            self._step = step
            self._process = self._start()

    def finish(self) -> bool:
        """Draw the final state and wait for it; return whether it is drawn.

        A drawing in progress is waited for, too; with `finish_seconds` it is killed, and so is a last one that is late.
        """
        limit = self.finish_seconds or LAST_SECONDS
        try:
            if self.finish_seconds is None and self._process is not None:
                self._process.wait(limit)
            self.end()
            self._process = self._start()
            return self._process is not None and self._process.wait(limit) == 0
        except subprocess.TimeoutExpired:
            self.end()
            return False

    def end(self) -> None:
        """Kill a drawing in progress, if the wait for it has a limit."""
        if self.finish_seconds is not None and self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)

    def _start(self) -> "subprocess.Popen[bytes] | None":
        self._began = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
        try:
            return subprocess.Popen(
                [sys.executable, *self.arguments],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                env=environment | {"TQDM_DISABLE": "1"},  # the terminal's bar is the run's
                start_new_session=True,  # the terminal's Ctrl-C is for the run, which waits for its last chart
            )
        except OSError:  # no memory for another process: a run goes on without a chart
            return None
