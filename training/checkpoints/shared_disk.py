"""Shared disk: a check, before the first step, that every node sees the run directory of the first."""

import socket
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from common.errors import BadInput
from common.files import writing
from training.parallel.process_group import Ranks, from_coordinator, together

VISIBLE_SECONDS = 75.0  # NFS remembers what a folder has for up to 60 s (nfs(5), acdirmax)
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
        for earlier in directory.glob(f"{PROBE}*"):  # of a job that was killed
            earlier.unlink(missing_ok=True)
        with writing(probe):
            probe.touch()

    try:
        from_coordinator(ranks, write)
        together(ranks, lambda: _see(probe), only=ranks.local_rank == 0, group=ranks.download)
    finally:
        if ranks.coordinates:
            with suppress(OSError):
                probe.unlink()


def _see(probe: Path) -> None:
    """Wait until the probe is there. Raises BadInput where it does not appear."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    # Looked up first, which asks the server; that it was not there may then be remembered, so list the folder, too.
    while not probe.exists() and probe not in probe.parent.iterdir():
        if time.monotonic() > deadline:
            raise BadInput(
                f"{probe.parent}: on {socket.gethostname()} it is not the run directory of the first node: a new file "
                f"there was not seen for {VISIBLE_SECONDS:.0f} s; put the run directory on a disk that all nodes share"
            )
        time.sleep(POLL_SECONDS)
