"""Signals: the callback gets the name of each signal, even while the main thread is not running Python code."""

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


def test_callback_gets_the_name_of_each_signal() -> None:
    process = subprocess.Popen([sys.executable, "-c", RECEIVER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
        process.send_signal(signal.Signals[name])
        assert process.stdout.readline() == f"{name}\n"
    assert process.wait(60) == 7
