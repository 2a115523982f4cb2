"""Copying between nodes that share no disk: every node gets the newest intact checkpoint that any node has."""

import bisect
import functools
import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from common.bucket import Bucket
from common.errors import BadInput
from common.files import is_folder, write_error
from common.output import show, warning
from training.checkpoints.atomic_commit import write_copy
from training.checkpoints.bucket_download import fetch
from training.checkpoints.directory import (
    LINKS,
    MANIFEST,
    STATE,
    TENSOR_FILES,
    archive,
    checkpoints_of,
    name_of,
    point,
)
from training.checkpoints.lookup import NEWEST, candidates, checkpoints_by_step, find_to_resume
from training.checkpoints.saved_state import read_state
from training.parallel.process_group import (
    DOWNLOAD_TIMEOUT,
    RankGroup,
    Ranks,
    Value,
    from_coordinator,
    gather,
    once_per_disk,
)

FILES = (*TENSOR_FILES, STATE, MANIFEST)
BROADCAST_BYTES = 64 << 20


@attrs.frozen
class DiskContent:
    """The checkpoints of a run on one disk."""

    steps: dict[int, str]  # step of each checkpoint -> the state_sha256 in its state.json
    choice: tuple[int, str] | None  # step and name of the checkpoint to resume from
    problem: str | None  # why there is no such checkpoint


@attrs.frozen
class Search:
    """The search for a checkpoint to resume from, on the disks of all nodes. Every rank makes the same search."""

    directory: Path
    name: str  # "auto", `latest`, `best`, or the name of a folder
    ranks: Ranks
    disk: RankGroup

    def on_disks(self, work: Callable[[], Value]) -> list[Value]:
        """Do the work once per disk; return the value from each disk."""
        return once_per_disk(self.ranks, self.disk, work)

    def contents(self) -> list[DiskContent]:
        """Return the content of each disk."""
        return self.on_disks(lambda: _list_disk(self.directory, self.name))


def find_on_disks(run_directory: Path, name: str, ranks: Ranks, disk: RankGroup, bucket: Bucket | None) -> Path | None:
    """Return the checkpoint to resume from, on this rank's disk; None if there is none on any disk or in the bucket.

    The checkpoint is chosen as in `find_to_resume`. If the bucket has a newer one, each node downloads it. A node
    without the chosen checkpoint receives a copy; before that, it archives its own checkpoints that the sender does not
    have. Call it on every rank. Raises BadInput if checkpoints exist but none of them is intact, or if disks have
    different checkpoints of the newest step.
    """
    search = Search(checkpoints_of(run_directory), name, ranks, disk)
    directory, contents = search.directory, search.contents()
    if bucket is not None and _fetch_newer(bucket, search, contents):
        contents = search.contents()
    choices = [content.choice for content in contents if content.choice is not None]
    if not choices:
        if problems := [content.problem for content in contents if content.problem is not None]:
            raise BadInput(problems[0] + ("" if bucket is None else f"; {bucket.url} has no checkpoint either"))
        return None
    newest, _ = max(choices)
    has_newest = [content.choice is not None and content.choice[0] == newest for content in contents]
    digests = {content.steps.get(newest) for content, has in zip(contents, has_newest, strict=True) if has}
    if len(digests) > 1:
        raise BadInput(
            f"{directory / name_of(newest)}: the nodes have different checkpoints of this name, from different runs: "
            f"state_sha256 {' and '.join(sorted(map(str, digests)))}; move the checkpoints of one run away"
        )
    leaders = [rank for rank, leads in enumerate(gather(ranks, disk.rank == 0)) if leads]  # the first rank of each disk
    disk_index = bisect.bisect(leaders, ranks.rank) - 1  # index of this rank's disk
    content, source = contents[disk_index], has_newest.index(True)
    is_here = has_newest[disk_index]
    checkpoint = directory / (content.choice[1] if content.choice is not None and is_here else name_of(newest))
    if receivers := [rank for rank, has in zip(leaders, has_newest, strict=True) if not has]:
        show(f"copying {name_of(newest)} to {len(receivers)} of {len(leaders)} nodes", once=True)
        source_steps = contents[source].steps
        unshared = [name_of(step) for step, digest in content.steps.items() if source_steps.get(step) != digest]
        archives = search.on_disks(lambda: None if is_here else _archive(directory, {*unshared, name_of(newest)}))
        show(*[f"other checkpoints were moved to {folder}" for folder in archives if folder], once=True)
        _copy(checkpoint, leaders[source], receivers, search)
    return checkpoint


def _list_disk(directory: Path, name: str) -> DiskContent:
    """Return the checkpoints on this disk, and the one that `name` means."""
    steps = {}
    for checkpoint in checkpoints_by_step(directory).values():
        with suppress(BadInput, OSError):  # the checkpoint is damaged or unreadable
            state = read_state(checkpoint)
            steps[state.position.step] = state.state_sha256
    try:
        choice = find_to_resume(directory, name)
    except BadInput as error:  # another node may have an intact checkpoint
        return DiskContent(steps, None, str(error))
    if choice is None:
        return DiskContent(steps, None, None)
    return DiskContent(steps, (read_state(choice).position.step, choice.name), None)


def _fetch_newer(bucket: Bucket, search: Search, contents: list[DiskContent]) -> bool:
    """Download the newest intact checkpoint of a bucket to all nodes, unless a node has one that is at least as new.

    Returns whether a checkpoint was downloaded.
    """
    directory, name, ranks = search.directory, search.name, search.ranks
    newest = max((content.choice for content in contents if content.choice is not None), default=None)
    damages: list[str] = []
    for candidate in from_coordinator(ranks, lambda: candidates(bucket, name), group=ranks.download):
        if newest is not None and name_of(newest[0]) >= candidate:
            return False
        show(f"downloading {candidate} from {bucket.url}", once=True)
        archives = search.on_disks(functools.partial(_archive, directory, {candidate}))
        show(*[f"the existing {candidate} was moved to {folder}" for folder in archives if folder], once=True)
        problems = [*filter(None, search.on_disks(functools.partial(fetch, bucket, directory / candidate)))]
        if not problems:
            if name in LINKS:
                search.on_disks(functools.partial(point, directory / name, candidate))
            return True
        show(warning(problems[0]), once=True)
        damages.append(problems[0])
    if damages and newest is None:
        advice = 'no other checkpoint is intact: set "checkpoints" to another prefix to start over'
        raise BadInput(f"{damages[0]}; {advice if name in NEWEST else 'resume from another one with --resume NAME'}")
    return False


def _archive(directory: Path, names: set[str]) -> str | None:
    """Archive the checkpoints with these names; return HOST:FOLDER of the archive, or None if there are none."""
    present = sorted(name for name in names if is_folder(directory / name))
    if not present:
        return None
    return f"{socket.gethostname()}:{archive(directory, present)}"


def _copy(checkpoint: Path, source: int, receivers: list[int], search: Search) -> None:
    """Copy a checkpoint from the disk of one rank to the disks of other ranks. Call it on every rank."""
    group, rank = (
        dist.new_group(sorted([source, *receivers]), timeout=DOWNLOAD_TIMEOUT, backend="gloo"),
        search.ranks.rank,
    )

    def move() -> None:
        if rank == source:
            _send(checkpoint, source, group)
        elif rank in receivers:
            _receive_checkpoint(checkpoint, source, group)

    search.on_disks(move)


def _send(checkpoint: Path, source: int, group: Any) -> None:
    files = [checkpoint / name for name in FILES]
    dist.broadcast(torch.tensor([file.stat().st_size for file in files]), source, group=group)
    for file in files:
        with file.open("rb") as opened:
            while piece := opened.read(BROADCAST_BYTES):
                dist.broadcast(torch.frombuffer(bytearray(piece), dtype=torch.uint8), source, group=group)


def _receive_checkpoint(checkpoint: Path, source: int, group: Any) -> None:
    """Write the files that another node sends.

    All files are received even if they cannot be written, because otherwise the sender would wait forever. After that,
    BadInput is raised.
    """
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
    """Yield (offset in bytes, content) of each piece of a file."""
    for offset in range(0, size, BROADCAST_BYTES):
        piece = torch.empty(min(BROADCAST_BYTES, size - offset), dtype=torch.uint8)
        dist.broadcast(piece, source, group=group)
        yield offset, memoryview(piece.numpy().data)
