"""Shared disk: a check, before the first step, that every node sees the run directory of the first."""

import socket
import time
from pathlib import Path
from uuid import uuid4

from common.errors import BadInput
from common.files import writing
from training.parallel.process_group import Ranks, from_coordinator, together

VISIBLE_SECONDS = 30.0  # network disks show new files late
POLL_SECONDS = 0.2
PROBE = ".shared-disk-"  # begins the name of the file that is looked for


def check_shared_disk(directory: Path, ranks: Ranks) -> None:
    """Raise BadInput where the nodes' run directories are different ones. Call it on every rank.

    Checkpoints are written by all ranks, each its own rows, and read by all.
    """
    if ranks.local_world_size == ranks.world_size:  # one node; then so on all ranks
        return
    probe = directory / from_coordinator(ranks, lambda: PROBE + uuid4().hex)

    def write() -> None:
        with writing(probe):
            probe.touch()

    try:
        from_coordinator(ranks, write)
        together(ranks, lambda: _see(probe), only=ranks.local_rank == 0)
    finally:
        if ranks.coordinates:
            probe.unlink(missing_ok=True)


def _see(probe: Path) -> None:
    """Wait until the probe is there. Raises BadInput where it does not appear."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while probe not in probe.parent.iterdir():  # a new listing: a lookup of the name may be answered from memory
        if time.monotonic() > deadline:
            raise BadInput(
                f"{probe.parent}: on {socket.gethostname()} it is not the run directory of the first node: a new file "
                f"there was not seen for {VISIBLE_SECONDS:.0f} s; put the run directory on a disk that all nodes share"
            )
        time.sleep(POLL_SECONDS)
