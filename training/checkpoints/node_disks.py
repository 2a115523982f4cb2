"""Disks of a job's nodes: one run directory that all share, or one on each node, with whole checkpoints in each.

Of several, the first node's alone has metrics, chart and exit record.
"""

import functools
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import attrs

from common.errors import BadInput
from common.files import writing
from training.config.train_config import Run
from training.parallel.mesh import ALONE, RankGroup
from training.parallel.process_group import Ranks, from_coordinator, gather, together
from training.parallel.wrap import Parallel

# New files that the other nodes look for, one a poll: a name that was looked up before it was there may stay unknown to
# a network disk's client for a minute.
PROBES = 20
POLL_SECONDS = 0.5
PREFIX = ".shared-disk-"  # begins their names

Value = TypeVar("Value")


@attrs.frozen
class NodeDisks:
    """How the ranks of a job keep the run directory."""

    ranks: Ranks
    shared: bool = True

    @property
    def keeps(self) -> bool:
        """True on the rank that keeps a run directory: on rank 0, or on the first one of each node."""
        return self.ranks.coordinates if self.shared else self.ranks.local_rank == 0

    def on_each(self, work: Callable[[], Value]) -> list[Value]:
        """Call `work` for each run directory, on the rank that keeps it; return the values on every rank.

        Call it on every rank. Raises BadInput as `together` does.
        """
        return together(self.ranks, work, only=self.keeps, group=self.ranks.download)

    def writers(self, parallel: Parallel) -> tuple[RankGroup, RankGroup]:
        """Return the ranks that write a replica to this run directory, and those that write the same shard there."""
        if self.shared:
            return parallel.data_parallel, parallel.levels.across
        return RankGroup(rank=self.ranks.local_rank, size=self.ranks.local_world_size, group=None), ALONE


def find_disks(run: Run, ranks: Ranks) -> NodeDisks:
    """Return whether the nodes share the run directory. Call it on every rank.

    Raises BadInput where some do and others do not, where theirs have other configurations, and where each would have
    shards of its own only.
    """
    if ranks.local_world_size == ranks.world_size:  # one node; then so on all ranks
        return NodeDisks(ranks)
    directory = run.directory
    names = from_coordinator(ranks, lambda: [f"{PREFIX}{uuid4().hex}-{number}" for number in range(PROBES)])

    def write() -> None:
        for earlier in directory.glob(f"{PREFIX}*"):  # of a job that was killed
            earlier.unlink(missing_ok=True)
        for name in names:
            with writing(directory / name):
                (directory / name).touch()

    try:
        from_coordinator(ranks, write)
        see = functools.partial(_see, directory, names)
        seen = together(ranks, see, only=ranks.local_rank == 0, group=ranks.download)
    finally:
        if ranks.coordinates:
            for name in names:
                with suppress(OSError):
                    (directory / name).unlink()
    if all(sees for _, sees in seen):
        return NodeDisks(ranks)
    others = ", ".join(host for host, sees in seen if not sees)
    where = f"{directory}: on {others} it is not the run directory of the first node, {seen[0][0]}"
    if any(sees for _, sees in seen[1:]):
        raise BadInput(f"{where}, but on other nodes it is; give all nodes one shared disk, or each its own")
    if run.train.execution.parallel == "fsdp":
        raise BadInput(
            f'{where}: parallel "fsdp" shards over all nodes, and none would have a whole checkpoint; set parallel to '
            '"hsdp" or "ddp", or put the run directory on a disk that all nodes share'
        )
    configurations = gather(ranks, (attrs.asdict(run.model), run.train.flat()))
    if any(other != configurations[0] for other in configurations):
        raise BadInput(f"{where}, and has another model.json or train.json; bring the same files to all nodes")
    return NodeDisks(ranks, shared=False)


def _see(directory: Path, names: list[str]) -> tuple[str, bool]:
    """Return this node's host name, and whether one of the files appears."""
    for name in names:
        if (directory / name).exists():
            return socket.gethostname(), True
        time.sleep(POLL_SECONDS)
    return socket.gethostname(), False
