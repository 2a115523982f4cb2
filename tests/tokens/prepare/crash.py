"""Run prepare_data.py, but kill the process when it reaches the point CRASH_AT for the CRASH_TIME-th time."""

import os
import signal
import sys

import prepare_data
from tokens.prepare import bucket_output as bucket
from tokens.prepare import token_writer

points: list[str] = []


def reached(point: str) -> None:
    points.append(point)
    if point == os.environ["CRASH_AT"] and points.count(point) >= int(os.environ["CRASH_TIME"]):
        os.kill(os.getpid(), signal.SIGKILL)


token_writer.reached = bucket.reached = reached
if __name__ == "__main__":
    sys.exit(prepare_data.main())
