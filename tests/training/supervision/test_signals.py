"""Signals: each one reaches the callback by name, even while the main thread does not run Python."""

import signal
import subprocess
import sys

from tests.conftest import ROOT

RECEIVER = """
import hashlib
import os
import sys

from training.supervision.supervision import receive_signals


def received(name):
    print(name, flush=True)
    if name == "SIGHUP":
        os._exit(7)


receive_signals(received)
assert "torch" not in sys.modules
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # many minutes in C code, during which Python runs no handler
"""


def test_signals_reach_the_callback_by_name() -> None:
    process = subprocess.Popen([sys.executable, "-c", RECEIVER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
        process.send_signal(signal.Signals[name])
        assert process.stdout.readline() == f"{name}\n"
    assert process.wait(60) == 7
