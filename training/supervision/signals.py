"""Signals that ask a run to stop, received by a thread. Needs no torch, whose import outlasts some notices."""

import os
import signal
import threading
from collections.abc import Callable

# A cloud's notice, Ctrl-C, a batch system's notice, a closed terminal.
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def receive_signals(on_signal: Callable[[str], object]) -> None:
    """Call `on_signal` with the name of each signal from now on, in a thread. Call it once, in the main thread."""
    received, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    for number in NUMBERS:
        signal.signal(number, lambda *_: None)
    # Python's own handlers wait while the main thread is in C++, as in a rendezvous or collective; this pipe does not.
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def listen() -> None:
        while True:
            number = os.read(received, 1)[0]
            if number in NUMBERS:
                on_signal(signal.Signals(number).name)

    threading.Thread(target=listen, name="signals", daemon=True).start()
