"""The disk of a run directory: one that all nodes share, or one of each node.

A disk is the group of the ranks that use it, in the order of the job; its first rank does what is done once per disk,
such as locking the run directory, or publishing and removing checkpoints. Each disk has whole checkpoints; of several,
the disk of rank 0 alone has metrics, chart and exit record.
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

# Files by which each node looks for the others, one per poll: a file that the client of a network disk did not find
# once, it may not look for again for a minute.
PROBES = 20
PROBE_POLL_SECONDS = 1.0
PREFIX = ".shared-disk-"  # begins their names


def find_disk(run: Run, ranks: Ranks) -> RankGroup:
    """Return the ranks that use the same run directory as this one: all, or those of its node. Call it on every rank.

    Raises BadInput if nodes have different configurations, if some share a disk and others do not, and if each would
    have its own shards only.
    """
    _check_configurations(run, ranks)
    directory, leads = run.directory, ranks.node.rank == 0
    names = gather(ranks, f"{PREFIX}{uuid4().hex}" if leads else None)
    probes = [name for name in names if name is not None]
    probe = names[ranks.rank - ranks.node.rank]  # this node's

    def write() -> None:
        for number in range(PROBES):
            with writing(directory / f"{probe}-{number}"):
                (directory / f"{probe}-{number}").touch()

    try:
        together(ranks, write, only=leads)
        look = functools.partial(_visible, directory, [other for other in probes if other != probe])
        visible = together(ranks, look, only=leads, group=ranks.download)
    finally:
        for path in directory.glob(f"{probe}-*") if leads else ():
            with suppress(OSError):
                path.unlink()
    counts = [count for _, count in visible]
    if min(counts) == len(probes) - 1:
        return RankGroup(rank=ranks.rank, size=ranks.world_size)
    where = f"{directory}: it is not one directory on all nodes, {', '.join(host for host, _ in visible)}"
    if max(counts) > 0:
        raise BadInput(f"{where}, but on some; give all nodes one shared disk, or each its own")
    if run.train.execution.parallel == "fsdp":
        raise BadInput(
            f'{where}: parallel "fsdp" shards over all nodes, and none would have a whole checkpoint; set parallel to '
            '"hsdp" or "ddp", or put the run directory on a disk that all nodes share'
        )
    return ranks.node


def _check_configurations(run: Run, ranks: Ranks) -> None:
    """Raise BadInput if a node would train another run: its collectives would not meet those of the other nodes."""
    configuration = {f"model.{key}": value for key, value in attrs.asdict(run.model).items()}
    configuration |= {f"train.{key}": value for key, value in run.train.flat().items()}
    configurations = gather(ranks, (socket.gethostname(), configuration))
    first_host, first = configurations[0]
    for host, values in configurations:
        for key, value in first.items():
            if values[key] != value:
                raise BadInput(
                    f"{run.directory}: {key}: got {json.dumps(values[key])} on {host}, but {json.dumps(value)} on the "
                    f"first node, {first_host}; bring the same model.json, train.json and --set to all nodes"
                )


def _visible(directory: Path, probes: list[str]) -> tuple[str, int]:
    """Return this node's host name, and how many of the other nodes' files appear in its run directory."""
    missing = set(probes)
    for number in range(PROBES):
        missing -= {probe for probe in missing if (directory / f"{probe}-{number}").exists()}
        if not missing:
            break
        time.sleep(PROBE_POLL_SECONDS)
    return socket.gethostname(), len(probes) - len(missing)
