"""Disks of a job's nodes: one run directory that all share, or one on each, and the space that checkpoints need there.

Each has whole checkpoints; of several, the first node's alone has metrics, chart and exit record.
"""

import functools
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import attrs

from common.errors import BadInput
from common.files import is_folder, writing
from common.quantities import readable_bytes
from model.counts import parameter_count
from training.checkpoints.directory import checkpoints_of, names_in, stale_partials
from training.config.train_config import Run
from training.hardware.preflight import DiskNeed
from training.launch import setting
from training.parallel.process_group import Ranks, Value, gather, together

# Files by which each node looks for the others, one a poll: what a network disk's client did not find once, it may not
# look for again for a minute.
PROBES = 20
PROBE_POLL_SECONDS = 1.0
PREFIX = ".shared-disk-"  # begins their names
CHECKPOINT_BYTES = 12  # a parameter's weight and two moments in fp32, the most that an optimizer here has
DISK_BLOCK_BYTES = 512  # of st_blocks, by POSIX whatever the file system has
BESIDE = 2  # checkpoints beside the newest ones: the best, and the one being written


@attrs.frozen
class NodeDisks:
    """Run directory of a job: shared by its nodes, or one on each."""

    ranks: Ranks
    shared: bool = True

    @property
    def keeps(self) -> bool:
        """True on the rank that keeps a run directory: on rank 0, or on the first one of each node."""
        return self.ranks.coordinates if self.shared else self.ranks.node.rank == 0

    def on_each(self, work: Callable[[], Value]) -> list[Value]:
        """Call `work` on the rank that keeps each run directory; return the values on every rank, as `together`."""
        return together(self.ranks, work, only=self.keeps, group=self.ranks.download)

    @property
    def writes(self) -> bool:
        """True on the ranks that write checkpoints: on those of the first node, or on all, each to its own node's disk.

        One node alone writes to a disk that several share: clients of a network file system write whole pages, and one
        would write its outdated copy of a page over the bytes that another has put there.
        """
        return not self.shared or self.ranks.rank == self.ranks.node.rank

    def of_own_disk(self, values: list[Value]) -> list[Value]:
        """Return, of each rank's value, those of the ranks whose rows are in this node's checkpoints."""
        first = self.ranks.rank - self.ranks.node.rank
        return values if self.shared else values[first : first + self.ranks.node.size]


def find_disks(run: Run, ranks: Ranks) -> NodeDisks:
    """Return whether the nodes share the run directory. Call it on every rank.

    Raises BadInput where nodes have other configurations, where some share a disk and others do not, and where each
    would have shards of its own only.
    """
    if ranks.node.size == ranks.world_size:  # one node; then so on all ranks
        return NodeDisks(ranks)
    _check_configurations(run, ranks)
    directory, leads = run.directory, ranks.node.rank == 0
    told = gather(ranks, f"{PREFIX}{uuid4().hex}" if leads else None)
    probes = [probe for probe in told if probe is not None]
    own = told[ranks.rank - ranks.node.rank]

    def write() -> None:
        for number in range(PROBES):
            with writing(directory / f"{own}-{number}"):
                (directory / f"{own}-{number}").touch()

    try:
        together(ranks, write, only=leads)
        see = functools.partial(_see, directory, [probe for probe in probes if probe != own])
        seen = together(ranks, see, only=leads, group=ranks.download)
    finally:
        for path in directory.glob(f"{own}-*") if leads else ():
            with suppress(OSError):
                path.unlink()
    counts = [count for _, count in seen]
    if min(counts) == len(probes) - 1:
        return NodeDisks(ranks)
    where = f"{directory}: it is not one directory on all nodes, {', '.join(host for host, _ in seen)}"
    if max(counts) > 0:
        raise BadInput(f"{where}, but on some; give all nodes one shared disk, or each its own")
    if run.train.execution.parallel == "fsdp":
        raise BadInput(
            f'{where}: parallel "fsdp" shards over all nodes, and none would have a whole checkpoint; set parallel to '
            '"hsdp" or "ddp", or put the run directory on a disk that all nodes share'
        )
    return NodeDisks(ranks, shared=False)


def disk_need(run: Run, *, resumes: bool) -> DiskNeed:
    """Return the space that checkpoints will take.

    If the run resumes, that is less what it will delete: checkpoints, and what a killed save has left. A run that
    resumes is never refused: it has saved here before.
    """
    size = CHECKPOINT_BYTES * parameter_count(run.model)
    directory, count = checkpoints_of(run.directory), run.train.checkpoints.keep_checkpoints + BESIDE
    least, there, leftovers = size, 0, 0
    if resumes and any(is_folder(directory / name) for name in names_in(directory)):  # else those there are archived
        files = [file for file in directory.glob("step-*/*") if file.is_file()]
        there = min(sum(file.stat().st_size for file in files), (count - 1) * size)
        # The next save removes them. Their files have their full size from the beginning, but not their blocks.
        hidden = [file for path in stale_partials(directory) for file in path.glob("*")]
        leftovers = sum(DISK_BLOCK_BYTES * file.lstat().st_blocks for file in hidden)
        least = 0
    return DiskNeed(
        directory=directory,
        what=f"{count} checkpoints of {readable_bytes(size)}, less those there",
        least_bytes=least,
        total_bytes=max(0, count * size - there - leftovers),
        advice=f"free some, make {directory} a link to a larger disk, or keep fewer with {setting(keep_checkpoints=1)}",
        in_place=True,
    )


def _check_configurations(run: Run, ranks: Ranks) -> None:
    """Raise BadInput where a node would train another run: its collectives would not meet the others'."""
    own = {f"model.{key}": value for key, value in attrs.asdict(run.model).items()}
    own |= {f"train.{key}": value for key, value in run.train.flat().items()}
    told = gather(ranks, (socket.gethostname(), own))
    for host, values in told:
        for key, value in told[0][1].items():
            if values[key] != value:
                raise BadInput(
                    f"{run.directory}: {key}: got {json.dumps(values[key])} on {host}, but {json.dumps(value)} on the "
                    f"first node, {told[0][0]}; bring the same model.json, train.json and --set to all nodes"
                )


def _see(directory: Path, probes: list[str]) -> tuple[str, int]:
    """Return this node's host name, and how many of the others' files appear."""
    missing = set(probes)
    for number in range(PROBES):
        missing -= {probe for probe in missing if (directory / f"{probe}-{number}").exists()}
        if not missing:
            break
        time.sleep(PROBE_POLL_SECONDS)
    return socket.gethostname(), len(probes) - len(missing)
