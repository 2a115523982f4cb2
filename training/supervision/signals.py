"""Signals that ask a run to stop: heard from the first moment on, obeyed where nothing is lost.

Until training begins there is nothing to save, and the process ends at once. From then on a signal is only noted, and
all ranks agree between two steps to stop. torch is not needed here: importing it takes longer than some notices leave.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from common.errors import EXIT_ERROR, EXIT_STOPPED
from training.supervision.run_lock import Claim

# The cloud's notice, Ctrl-C, a batch system's notice, a closed terminal.
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopSignals:
    """What this process has been asked. One object per process, made by the entry script."""

    def __init__(self) -> None:
        self.asked = False
        self.claim: Claim | None = None  # to say on the way out how it ended
        # What has become of another rank, if that is why torchrun asks; None until the ranks have met, and then set.
        self.explain_stop: Callable[[], str | None] | None = None
        self._training = False
        heard, hears = os.pipe()
        os.set_blocking(hears, False)
        for number in NUMBERS:
            signal.signal(number, lambda *_: None)
        # Python's own handlers wait while the main thread is in C++, as in a rendezvous: a thread listens instead.
        signal.set_wakeup_fd(hears, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(heard,), name="signals", daemon=True).start()

    def ask(self) -> None:
        """Ask this rank to stop at the next step boundary."""
        self.asked = True

    def training_begins(self) -> None:
        """From now on signals are noted only."""
        self._training = True

    def wait(self, seconds: float) -> bool:
        """Wait until asked to stop, but no longer than so many seconds; return whether asked."""
        deadline = time.monotonic() + seconds
        while not self.asked and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.asked

    def _listen(self, heard: int) -> None:
        while True:
            numbers = os.read(heard, 1)
            if numbers[0] not in NUMBERS:
                continue
            self.asked = True
            if not self._training:
                self._end(signal.Signals(numbers[0]).name)

    def _end(self, name: str) -> NoReturn:
        outcome = None if self.explain_stop is None else self.explain_stop()
        if outcome is not None:
            if self.claim is not None:
                self.claim.end(EXIT_ERROR, outcome)
            os._exit(EXIT_ERROR)
        if self.claim is not None:
            self.claim.end(EXIT_STOPPED, final=self.explain_stop is not None)
            print(f"train.py: {name} before the first step: nothing is lost; the same command continues", flush=True)
        os._exit(EXIT_STOPPED)
