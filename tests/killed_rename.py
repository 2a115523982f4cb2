"""Run a Python script and kill it before it renames a folder to its final name: SCRIPT ARGUMENTS...

The environment variable KILL_AT is the final name of the folder.
"""

import os
import runpy
import signal
import sys


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if event == "os.rename" and os.fspath(arguments[1]) == os.environ["KILL_AT"]:  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.addaudithook(watch)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
