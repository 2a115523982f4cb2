"""The disk of a run directory: either all nodes share the same disk, or each node has its own.

A disk is represented by the group of the ranks that use it, in ascending order. The first rank of a disk does the
work that is needed once per disk, such as locking the run directory, or publishing and removing checkpoints. Each disk
has complete checkpoints. If there are several disks, only the disk of rank 0 has the metrics, the chart and the exit
record.
"""

import functools
import json
import socket
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import attrs

from common.errors import BadInput
from common.files import writing
from training.config.train_config import Run
from training.parallel.process_group import RankGroup, Ranks, gather, together

# Each node writes this many probe files, and in each poll it looks for a different file of every other node. If a
# client of a network disk does not find a file, it sometimes waits a minute before it looks for that file again.
PROBES = 20
PROBE_POLL_SECONDS = 1.0
PREFIX = ".shared-disk-"  # beginning of the names of probe files


def find_disk(run: Run, ranks: Ranks) -> RankGroup:
    """Return the ranks that use the same run directory as this one: all ranks, or the ranks of this node.

    Call it on every rank. Raises BadInput if the nodes have different configurations, if only some of them share a
    disk, or if every node would have only its shards of a checkpoint.
    """
    _check_configurations(run, ranks)
    directory, leads = run.directory, ranks.node.rank == 0
    names = gather(ranks, f"{PREFIX}{uuid4().hex}" if leads else None)
    probes = [name for name in names if name is not None]
    probe = names[ranks.rank - ranks.node.rank]  # the probe of this node

    def write() -> None:
        for number in range(PROBES):
            with writing(directory / f"{probe}-{number}"):
                (directory / f"{probe}-{number}").touch()

    try:
        together(ranks, write, only=leads)
        count_visible = functools.partial(_count_visible, directory, [name for name in probes if name != probe])
        hosts_and_counts = together(ranks, count_visible, only=leads, group=ranks.download)
    finally:
        for path in directory.glob(f"{probe}-*") if leads else ():
            with suppress(OSError):
                path.unlink()
    counts = [count for _, count in hosts_and_counts]
    if min(counts) == len(probes) - 1:
        return RankGroup(rank=ranks.rank, size=ranks.world_size)
    nodes = f"the nodes ({', '.join(host for host, _ in hosts_and_counts)})"
    if max(counts) > 0:
        raise BadInput(
            f"{directory}: some of {nodes} share this directory, but not all; give all nodes one shared disk, or each "
            "node a separate one"
        )
    if run.train.execution.parallel == "fsdp":
        raise BadInput(
            f'{directory}: {nodes} do not share this directory, and "parallel": "fsdp" shards over all nodes, so no '
            'node would have a complete checkpoint; set "parallel" to "hsdp" or "ddp", or put the run directory on a '
            "disk that all nodes share"
        )
    return ranks.node


def _check_configurations(run: Run, ranks: Ranks) -> None:
    """Raise BadInput if nodes have different configurations, because their collectives would not match."""
    configuration = {f"model.{key}": value for key, value in attrs.asdict(run.model).items()}
    configuration |= {f"train.{key}": value for key, value in run.train.flat().items()}
    configurations = gather(ranks, (socket.gethostname(), configuration))
    first_host, first = configurations[0]
    for host, values in configurations:
        for key, value in first.items():
            if values[key] != value:
                raise BadInput(
                    f"{run.directory}: {key}: got {json.dumps(values[key])} on {host}, but {json.dumps(value)} on the "
                    f"first node, {first_host}; use the same model.json, train.json and --set on all nodes"
                )


def _count_visible(directory: Path, probes: list[str]) -> tuple[str, int]:
    """Return this node's host name, and the number of other nodes whose probes appear in this node's run directory."""
    missing = set(probes)
    for number in range(PROBES):
        missing -= {probe for probe in missing if (directory / f"{probe}-{number}").exists()}
        if not missing:
            break
        time.sleep(PROBE_POLL_SECONDS)
    return socket.gethostname(), len(probes) - len(missing)
