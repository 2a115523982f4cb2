"""Command of --then: run once, by rank 0, after a job that ended as done or stopped with a checkpoint.

Rank 0 holds the run lock until the command has ended: no other job begins what it might power off. It runs in a session
of its own, without torchrun's variables, and so outlives a torchrun that ends its ranks.
"""

import os
import subprocess
import time
from pathlib import Path

from common.errors import EXIT_STOPPED, printable
from common.files import LOCK_POLL_SECONDS
from training.launch import environment_rank, without_launcher
from training.supervision.run_lock import NODE_VARIABLE, lock_is_held


def run_then(command: str, run_directory: Path, status: int, *, uploaded: bool) -> None:
    """Run the command and print its exit status, with all checkpoints in the bucket. Call it on every rank."""
    if environment_rank() != 0:
        # torchrun ends all ranks once one has ended with another status than 0.
        while status == EXIT_STOPPED and os.environ.get("GROUP_RANK", "0") == "0" and lock_is_held(run_directory):
            time.sleep(LOCK_POLL_SECONDS)
    elif not uploaded:
        print("--then: NOT RUN: the bucket lacks the last checkpoint", flush=True)
    else:
        print(printable(f"--then: {command}"), flush=True)
        environment = without_launcher()
        environment.pop(NODE_VARIABLE, None)
        ended = subprocess.run(command, shell=True, env=environment, start_new_session=True, check=False).returncode
        print(f"--then: ended with status {ended}", flush=True)
