"""A version of train.py that loses its output, or whose advisory code fails.

Two environment variables with JSON lists determine this:

LOSSES  entries [step, stream, kind of failure]; stream 1 is stdout and stream 2 is stderr
BROKEN  the functions that raise an exception instead of working, each as MODULE:NAME
"""

import importlib
import json
import os
import pty
import select
import sys
from typing import Any, NoReturn

import train
from training import loop
from training.telemetry.chart import BackgroundChart

plain_step = loop.train_step


def lose(number: int, kind: str) -> None:
    """Make a stream fail, as when its reader ends or stops, its disk is full, or its terminal is closed."""
    if kind == "closed":
        os.close(number)
    elif kind == "closed by Python":
        (sys.stdout if number == 1 else sys.stderr).close()
    elif kind == "full disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)
    else:
        reader, writer = pty.openpty() if kind == "closed terminal" else os.pipe()
        os.dup2(writer, number)
        if kind == "stopped reader":
            while select.select([], [number], [], 0)[1]:
                os.write(number, bytes(select.PIPE_BUF))
        else:
            os.close(reader)


def step(state: Any, settings: Any, number: int, *arguments: Any) -> Any:
    for lossy_step, stream, kind in json.loads(os.environ.get("LOSSES", "[]")):
        if lossy_step == number:
            lose(stream, kind)
    return plain_step(state, settings, number, *arguments)


def fail(*_: Any, **__: Any) -> NoReturn:
    raise ZeroDivisionError("advice")


for path in json.loads(os.environ.get("BROKEN", "[]")):
    module, _, name = path.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, function = name.split(".")
    for class_name in classes:
        owner = getattr(owner, class_name)
    assert hasattr(owner, function)
    setattr(owner, function, fail)
if "LOSSES" in os.environ:
    # The chart's replacement in tests/launch.py needs the run's stdout and stderr, which are broken here.
    BackgroundChart._start = lambda _: None
loop.train_step = step
train.leave(train.main())
