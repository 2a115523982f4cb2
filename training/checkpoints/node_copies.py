"""Copies of checkpoints, without a shared disk: the newest one that any node holds intact is brought to the others."""

import bisect
import functools
import itertools
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from common.bucket import Bucket
from common.errors import BadInput, warning
from common.files import is_folder, write_error
from training.checkpoints.atomic_commit import point, write_copy
from training.checkpoints.bucket_checkpoints import NEWEST, candidates, fetch
from training.checkpoints.directory import (
    LINKS,
    MANIFEST,
    STATE,
    TENSOR_FILES,
    archive,
    checkpoints_of,
    name_of,
)
from training.checkpoints.node_disks import NodeDisks
from training.checkpoints.saved_state import checkpoints_by_step, find, read_state
from training.parallel.process_group import DOWNLOAD_TIMEOUT, from_coordinator, gather
from training.telemetry.reporter import print_lines

FILES = (*TENSOR_FILES, STATE, MANIFEST)
BROADCAST_BYTES = 64 << 20


@attrs.frozen
class HeldCheckpoints:
    steps: dict[int, str]  # state_sha256 of each step's checkpoint, as its state.json has it
    found: tuple[int, str] | None  # step and name of the one to resume from
    problem: str | None  # why there is none


def find_on_nodes(run_directory: Path, wanted: str, disks: NodeDisks, bucket: Bucket | None) -> Path | None:
    """Return the checkpoint to resume from, on this node's disk; None where no node and no bucket has any. See `find`.

    A newer one of the bucket is downloaded by each node. A node that has to be brought one by another puts into the
    archive what that has not, too. Call it on every rank. Raises BadInput where nodes have some and none is intact, or
    different newest ones.
    """
    directory = checkpoints_of(run_directory)
    on_nodes = disks.on_each(lambda: _look(directory, wanted))
    if bucket is not None and _fetch_newer(bucket, directory, wanted, disks, on_nodes):
        on_nodes = disks.on_each(lambda: _look(directory, wanted))
    found = [node.found for node in on_nodes if node.found is not None]
    if not found:
        if problems := [node.problem for node in on_nodes if node.problem is not None]:
            raise BadInput(problems[0] + ("" if bucket is None else f"; there is none in {bucket.url}, either"))
        return None
    newest, _ = max(found)
    holds = [node.found is not None and node.found[0] == newest for node in on_nodes]
    source = holds.index(True)
    digests = {node.steps.get(newest) for node, holding in zip(on_nodes, holds, strict=True) if holding}
    if len(digests) > 1:
        raise BadInput(
            f"{directory / name_of(newest)}: nodes have different ones, with state_sha256 "
            f"{' and '.join(sorted(map(str, digests)))}, of different runs; move the checkpoints of one away"
        )
    keepers = [rank for rank, keeps in enumerate(gather(disks.ranks, disks.keeps)) if keeps]
    place = bisect.bisect(keepers, disks.ranks.rank) - 1  # this node's
    own = on_nodes[place]
    checkpoint = directory / (own.found[1] if own.found is not None and holds[place] else name_of(newest))
    if taking := [rank for rank, held_there in zip(keepers, holds, strict=True) if not held_there]:
        print_lines(disks.ranks, [f"bringing {name_of(newest)} to {len(taking)} of {len(keepers)} nodes"])
        known = on_nodes[source].steps
        strange = [name_of(step) for step, digest in own.steps.items() if known.get(step) != digest]
        archived = disks.on_each(lambda: None if holds[place] else _archive(directory, {*strange, name_of(newest)}))
        print_lines(disks.ranks, [f"what else was there is now in {where}" for where in archived if where])
        _bring(checkpoint, keepers[source], taking, disks)
    return checkpoint


def _look(directory: Path, wanted: str) -> HeldCheckpoints:
    steps = {}
    for checkpoint in checkpoints_by_step(directory).values():
        with suppress(BadInput, OSError):  # a damaged or unreadable one
            state = read_state(checkpoint)
            steps[state.position.step] = state.state_sha256
    try:
        found = find(directory, wanted)
    except BadInput as error:  # another node may have it
        return HeldCheckpoints(steps, None, str(error))
    return HeldCheckpoints(steps, None if found is None else (read_state(found).position.step, found.name), None)


def _fetch_newer(
    bucket: Bucket, directory: Path, wanted: str, disks: NodeDisks, on_nodes: list[HeldCheckpoints]
) -> bool:
    """Download a bucket's newest intact checkpoint to all nodes, if newer than theirs; tell whether."""
    held = max((node.found for node in on_nodes if node.found is not None), default=None)
    damaged: list[str] = []
    for name in from_coordinator(disks.ranks, lambda: candidates(bucket, wanted), group=disks.ranks.download):
        if held is not None and name_of(held[0]) >= name:
            return False
        print_lines(disks.ranks, [f"downloading {name} from {bucket.url}"])
        archived = disks.on_each(functools.partial(_archive, directory, {name}))
        print_lines(disks.ranks, [f"what had its name is now in {where}" for where in archived if where])
        problems = [*filter(None, disks.on_each(functools.partial(fetch, bucket, directory / name)))]
        if not problems:
            if wanted in LINKS:
                disks.on_each(functools.partial(point, directory / wanted, name))
            return True
        print_lines(disks.ranks, [warning(problems[0])])
        damaged.append(problems[0])
    if damaged and held is None:
        others = "no other checkpoint is intact: set checkpoints to another prefix to start anew"
        raise BadInput(f"{damaged[0]}; {others if wanted in NEWEST else 'resume from another one with --resume NAME'}")
    return False


def _archive(directory: Path, names: set[str]) -> str | None:
    """Archive those of these checkpoints that are there; return where, with this node's host name."""
    present = sorted(name for name in names if is_folder(directory / name))
    if not present:
        return None
    return f"{socket.gethostname()}:{archive(directory, present)}"


def _bring(checkpoint: Path, source: int, taking: list[int], disks: NodeDisks) -> None:
    """Copy a checkpoint from the rank that holds it to those that do not. Call it on every rank."""
    group = dist.new_group(sorted([source, *taking]), timeout=DOWNLOAD_TIMEOUT, backend="gloo")

    def move() -> None:
        if disks.ranks.rank == source:
            _send(checkpoint, source, group)
        elif disks.ranks.rank in taking:
            _take(checkpoint, source, group)

    disks.on_each(move)


def _send(checkpoint: Path, source: int, group: Any) -> None:
    files = [checkpoint / name for name in FILES]
    dist.broadcast(torch.tensor([file.stat().st_size for file in files]), source, group=group)
    for file in files:
        with file.open("rb") as opened:
            while piece := opened.read(BROADCAST_BYTES):
                dist.broadcast(torch.frombuffer(bytearray(piece), dtype=torch.uint8), source, group=group)


def _take(checkpoint: Path, source: int, group: Any) -> None:
    """Write the files that another node sends; where that cannot be done, take them all the same, and raise then."""
    sizes = torch.empty(len(FILES), dtype=torch.int64)
    dist.broadcast(sizes, source, group=group)
    pieces = {file: _receive(size, source, group) for file, size in zip(FILES, sizes.tolist(), strict=True)}
    try:
        damage = write_copy(checkpoint, pieces)
    except OSError as error:
        for piece in itertools.chain.from_iterable(pieces.values()):
            del piece
        raise write_error(checkpoint, error) from error
    if damage is not None:
        raise BadInput(f"{damage}; run the same command again")


def _receive(size: int, source: int, group: Any) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset in bytes, content) of the pieces of a file."""
    for offset in range(0, size, BROADCAST_BYTES):
        piece = torch.empty(min(BROADCAST_BYTES, size - offset), dtype=torch.uint8)
        dist.broadcast(piece, source, group=group)
        yield offset, memoryview(piece.numpy().data)
