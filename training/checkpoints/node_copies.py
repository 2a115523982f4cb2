"""Copies of checkpoints, without a shared disk: the newest one that any node holds intact is brought to the others."""

import bisect
import functools
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from common.bucket import Bucket
from common.errors import BadInput
from common.files import write_error
from training.checkpoints.bucket_checkpoints import NEWEST, candidates, fetch
from training.checkpoints.directory import find
from training.checkpoints.disk import Disk, checkpoints_of, new_archive
from training.checkpoints.node_disks import NodeDisks
from training.checkpoints.saved_state import read_state
from training.checkpoints.storage import (
    LINKS,
    MANIFEST,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    Checkpoint,
    NewFile,
    followed_links,
    name_of,
    steps_in,
)
from training.checkpoints.verification import verify
from training.parallel.process_group import DOWNLOAD_TIMEOUT, from_coordinator, gather
from training.telemetry.reporter import print_lines

FILES = (WEIGHTS, OPTIMIZER, STATE, MANIFEST)  # the last one makes a checkpoint complete
PIECE_BYTES = 64 << 20


@attrs.frozen
class HeldCheckpoints:
    """Checkpoints of one node."""

    steps: dict[int, str]  # state_sha256 of each step's checkpoint, as its state.json has it
    found: tuple[int, str] | None  # step and name of the one to resume from
    problem: str | None  # why there is none


def find_on_nodes(run_directory: Path, wanted: str, disks: NodeDisks, bucket: Bucket | None) -> Checkpoint | None:
    """Return the checkpoint to resume from, on this node's disk; None where no node and no bucket has any. See `find`.

    A newer one of the bucket is downloaded by each node. A node that has to be brought one by another puts into the
    archive what that has not, too. Call it on every rank. Raises BadInput where nodes have some and none is intact, or
    different newest ones.
    """
    storage = checkpoints_of(run_directory)
    on_nodes = disks.on_each(lambda: _look(storage, wanted))
    if bucket is not None and _fetch_newer(bucket, storage, wanted, disks, on_nodes):
        on_nodes = disks.on_each(lambda: _look(storage, wanted))
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
            f"{storage.where(name_of(newest))}: nodes have different ones, with state_sha256 "
            f"{' and '.join(sorted(map(str, digests)))}, of different runs; move the checkpoints of one away"
        )
    keepers = [rank for rank, keeps in enumerate(gather(disks.ranks, disks.keeps)) if keeps]
    place = bisect.bisect(keepers, disks.ranks.rank) - 1  # this node's
    own = on_nodes[place]
    checkpoint = Checkpoint(storage, own.found[1] if own.found is not None and holds[place] else name_of(newest))
    if taking := [rank for rank, held_there in zip(keepers, holds, strict=True) if not held_there]:
        print_lines(disks.ranks, [f"bringing {name_of(newest)} to {len(taking)} of {len(keepers)} nodes"])
        known = on_nodes[source].steps
        strange = [name_of(step) for step, digest in own.steps.items() if known.get(step) != digest]
        archived = disks.on_each(lambda: None if holds[place] else _archive(storage, {*strange, name_of(newest)}))
        print_lines(disks.ranks, [f"what else was there is now in {where}" for where in archived if where])
        _bring(checkpoint, keepers[source], taking, disks)
    return checkpoint


def _look(storage: Disk, wanted: str) -> HeldCheckpoints:
    """Return what this node's disk has."""
    steps = {}
    for name in steps_in(storage):
        with suppress(BadInput):  # a damaged one
            state = read_state(Checkpoint(storage, name))
            steps[state.position.step] = state.state_sha256
    try:
        found = find(storage, wanted)
    except BadInput as error:  # another node may have it
        return HeldCheckpoints(steps, None, str(error))
    return HeldCheckpoints(steps, None if found is None else (read_state(found).position.step, found.name), None)


def _fetch_newer(bucket: Bucket, storage: Disk, wanted: str, disks: NodeDisks, on_nodes: list[HeldCheckpoints]) -> bool:
    """Download the newest intact checkpoint of a bucket to each node, where no node has one as new; return whether.

    A link that was wanted then refers to it. Raises BadInput where none is intact, here or there.
    """
    held = max((node.found for node in on_nodes if node.found is not None), default=None)
    damaged: list[str] = []
    for name in from_coordinator(disks.ranks, lambda: candidates(bucket, wanted), group=disks.ranks.download):
        if held is not None and name_of(held[0]) >= name:
            return False
        print_lines(disks.ranks, [f"downloading {name} from {bucket.url}"])
        archived = disks.on_each(functools.partial(_archive, storage, {name, *followed_links(storage)}))
        print_lines(disks.ranks, [f"what had its name is now in {where}" for where in archived if where])
        problems = [each for each in disks.on_each(functools.partial(fetch, bucket, name, storage)) if each is not None]
        if not problems:
            if wanted in LINKS:
                disks.on_each(functools.partial(storage.point, wanted, name))
            return True
        print_lines(disks.ranks, [f"WARNING: {problems[0]}"])
        damaged.append(problems[0])
    if damaged and held is None:
        others = "no other checkpoint is intact: set checkpoints to another prefix to start anew"
        raise BadInput(f"{damaged[0]}; {others if wanted in NEWEST else 'resume from another one with --resume NAME'}")
    return False


def _archive(storage: Disk, names: set[str]) -> str | None:
    """Set aside those of these checkpoints that are there; return where, with this node's host name."""
    present = sorted(name for name in names if storage.exists(name))
    if not present:
        return None
    return f"{socket.gethostname()}:{storage.set_aside(new_archive(storage.directory.parent), present)}"


def _bring(checkpoint: Checkpoint, source: int, taking: list[int], disks: NodeDisks) -> None:
    """Copy a checkpoint from the rank that holds it to those that do not. Call it on every rank."""
    group = dist.new_group(sorted([source, *taking]), timeout=DOWNLOAD_TIMEOUT, backend="gloo")

    def move() -> None:
        if disks.ranks.rank == source:
            _send(checkpoint, source, group)
        elif disks.ranks.rank in taking:
            _take(checkpoint, source, group)

    disks.on_each(move)


def _send(checkpoint: Checkpoint, source: int, group: Any) -> None:
    files = [checkpoint.file(name) for name in FILES]
    dist.broadcast(torch.tensor([file.stat().st_size for file in files]), source, group=group)
    for file in files:
        with file.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                dist.broadcast(torch.frombuffer(bytearray(piece), dtype=torch.uint8), source, group=group)


def _take(checkpoint: Checkpoint, source: int, group: Any) -> None:
    """Write what another node sends; where that cannot be done, take it all the same, and raise then."""
    storage, name = checkpoint.storage, checkpoint.name
    announced = torch.empty(len(FILES), dtype=torch.int64)
    dist.broadcast(announced, source, group=group)
    sizes = dict(zip(FILES, announced.tolist(), strict=True))
    problem: OSError | None = None

    def unless_failed(work: Callable[[], None]) -> None:
        nonlocal problem
        if problem is None:
            try:
                work()
            except OSError as error:
                problem = error

    unless_failed(lambda: storage.begin(name, {file: NewFile(b"", sizes[file]) for file in (WEIGHTS, OPTIMIZER)}))
    for file, size in sizes.items():
        for offset in range(0, size, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, size - offset), dtype=torch.uint8)
            dist.broadcast(piece, source, group=group)
            content = memoryview(piece.numpy().data)
            if file in {STATE, MANIFEST}:  # smaller than a piece
                unless_failed(functools.partial(storage.put, name, file, bytes(content)))
            else:
                unless_failed(functools.partial(storage.write_rows, name, file, [(offset, content)]))
    unless_failed(lambda: storage.publish(name))
    if problem is not None:
        storage.discard(name)
        raise write_error(checkpoint.file(WEIGHTS), problem) from problem
    if (damage := verify(checkpoint)) is not None:
        raise BadInput(f"{damage}; run the same command again")
