"""Copies of checkpoints, without a shared disk: the newest one that any node holds intact is brought to the others."""

import bisect
import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist

from common.errors import BadInput
from training.checkpoints.checkpoint_manifest import MANIFEST, verify
from training.checkpoints.directory import find
from training.checkpoints.node_disks import NodeDisks
from training.checkpoints.saved_state import STATE, read_state
from training.checkpoints.storage import Checkpoint, NewFile, Storage, name_of
from training.checkpoints.tensor_files import OPTIMIZER, WEIGHTS
from training.parallel.process_group import DOWNLOAD_TIMEOUT, gather
from training.telemetry.reporter import print_lines

FILES = (WEIGHTS, OPTIMIZER, STATE, MANIFEST)  # the last one makes a checkpoint complete
PIECE_BYTES = 64 << 20


@attrs.frozen
class HeldCheckpoint:
    """The checkpoint to resume from, as one node would have it."""

    step: int
    name: str
    state_sha256: str


def find_on_nodes(storage: Storage, wanted: str, disks: NodeDisks) -> Checkpoint | None:
    """Return the checkpoint to resume from, on this node's disk; None where no node has any. See `find`.

    Call it on every rank. Raises BadInput where nodes have some and none is intact, or not the same of one step.
    """
    if disks.shared:
        return disks.on_each(lambda: find(storage, wanted))[0]

    def look() -> tuple[HeldCheckpoint | None, str | None]:
        try:
            found = find(storage, wanted)
        except BadInput as error:  # another node may have it
            return None, str(error)
        if found is None:
            return None, None
        state = read_state(found)
        return HeldCheckpoint(state.position.step, found.name, state.state_sha256), None

    on_nodes = disks.on_each(look)
    held = [each for each, _ in on_nodes if each is not None]
    if not held:
        if problems := [problem for _, problem in on_nodes if problem is not None]:
            raise BadInput(problems[0])
        return None
    newest = max(held, key=lambda each: each.step)
    if others := {each.state_sha256 for each in held if each.step == newest.step} - {newest.state_sha256}:
        raise BadInput(
            f"{storage.where(newest.name)}: nodes have different ones of this name, with state_sha256 "
            f"{newest.state_sha256[:12]}... and {min(others)[:12]}...: of different runs; move one away"
        )
    holders = [each is not None and each.step == newest.step for each, _ in on_nodes]
    keepers = [rank for rank, keeps in enumerate(gather(disks.ranks, disks.keeps)) if keeps]
    own = on_nodes[bisect.bisect(keepers, disks.ranks.rank) - 1][0]  # this node's
    holds = own is not None and own.step == newest.step
    checkpoint = Checkpoint(storage, own.name if own is not None and holds else name_of(newest.step))
    source = keepers[holders.index(True)]
    if taking := [rank for rank, held_there in zip(keepers, holders, strict=True) if not held_there]:
        print_lines(disks.ranks, [f"bringing {name_of(newest.step)} to {len(taking)} of {len(keepers)} nodes"])
        _bring(checkpoint, source, taking, disks)
    return checkpoint


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
        raise problem
    if (damage := verify(checkpoint)) is not None:
        raise BadInput(f"{damage}; run the same command again")
