"""Preflight of the first GPU hour: the checks of training.hardware.preflight, with the disk that the hour needs.

python benchmarks/gpu_hour_preflight.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Literal

import command
from train_speed import SIZES

from model.config import parameter_count
from training.checkpoints.disk_need import STATE_BYTES
from training.hardware.preflight import DiskNeed, Needs, report

REST_BYTES = 2e9  # compiled kernels, random tokens, checkpoints of small networks


def main(*, largest: Literal["small", "1.5B"] = "1.5B") -> None:
    """Print the checks; exit status 1 where there is a problem.

    Args:
        largest: network; train.py starts no run without room for its checkpoint, even one that is killed before.
    """
    wanted = STATE_BYTES * parameter_count(SIZES[largest]) + REST_BYTES
    disk = DiskNeed(
        directory=Path(tempfile.gettempdir()),
        what=f"a checkpoint of {largest} and compiled kernels",
        least_bytes=wanted,
        total_bytes=wanted,
        advice="free some, or name a larger one with --output",
    )
    sys.exit(report(Needs(disk=disk)))


if __name__ == "__main__":
    command.run(main)
