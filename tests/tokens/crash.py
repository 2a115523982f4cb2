"""prepare_data.py that kills itself at a moment of tokens.writer.CRASH_POINTS: CRASH_AT, for the CRASH_TIME-th time."""

import os
import signal
import sys

import prepare_data
from tokens import writer

times = 0


def reached(point: str) -> None:
    global times
    times += point == os.environ.get("CRASH_AT")
    if times and times >= int(os.environ["CRASH_TIME"]):
        os.kill(os.getpid(), signal.SIGKILL)


writer.reached = reached
if __name__ == "__main__":
    sys.exit(prepare_data.main())
