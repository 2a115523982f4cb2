"""Upload of checkpoints to a bucket, behind the training: whole, from the local disk, one at a time.

    step-00000617/...         the files of docs/checkpoints.md, manifest.json last
    latest, best              objects that name a checkpoint
    lease.json                the job that uploads there

The ranks share out the files. A bucket that is slower than the checkpoints gets fewer of them; one that fails gets the
next one. Training waits for it at its end only.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import attrs
import torch.distributed as dist

from common.bucket import Bucket
from common.errors import BadInput
from common.files import is_folder
from training.checkpoints.bucket_checkpoints import complete_steps, complete_upload, holds, prune_bucket
from training.checkpoints.bucket_lease import BucketLease
from training.checkpoints.directory import MANIFEST, STATE, TENSOR_FILES
from training.checkpoints.node_disks import NodeDisks
from training.checkpoints.saved_state import best_name
from training.config.train_config import Run
from training.parallel.process_group import SAVE_TIMEOUT, from_coordinator, gather, together
from training.telemetry.reporter import print_lines


@attrs.frozen
class UploadOutcome:
    """Outcome of an upload; the same on every rank, but for the seconds."""

    name: str
    problem: str | None  # one line; None: the checkpoint is complete in the bucket
    seconds: float


@attrs.frozen
class OpenCheckpoint:
    """A checkpoint to upload, its files opened: the disk's retention may delete it meanwhile."""

    name: str
    tensors: dict[str, BinaryIO]  # those that this rank uploads
    small: dict[str, bytes]  # on rank 0: state and manifest
    best: str | None  # on rank 0: name of the best checkpoint


def open_uploader(run: Run, disks: NodeDisks) -> "Uploader | None":
    """Claim the bucket prefix of train.json's `checkpoints`; None without one. Call it on every rank.

    Raises BadInput where the bucket cannot be used, or another job uploads there.
    """
    url, ranks = run.train.checkpoints.checkpoints, disks.ranks
    if url is None:
        return None
    bucket = Bucket(url)
    lease: BucketLease | None = None

    def claim() -> None:
        nonlocal lease
        lease = BucketLease(bucket, run.directory, lambda line: print_lines(ranks, [line]))

    together(ranks, claim, only=ranks.coordinates, group=ranks.download)
    return Uploader(bucket, lease, run.train.checkpoints.keep_checkpoints, disks)


class Uploader:
    """Uploads to one prefix. Every rank calls `offer` and `finish` for the same checkpoints."""

    def __init__(self, bucket: Bucket, lease: BucketLease | None, keep: int, disks: NodeDisks):
        """`lease`: on rank 0, else None. `keep`: newest checkpoints to keep in the bucket."""
        self.bucket, self._lease, self._keep, self._disks = bucket, lease, keep, disks
        self._group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
        self._thread: threading.Thread | None = None
        self._outcomes: SimpleQueue[UploadOutcome] = SimpleQueue()  # not reported yet
        self._complete: str | None = None  # newest checkpoint of this job in the bucket
        self._under_way: str | None = None
        self._error: Exception | None = None  # what broke the group

    def offer(self, checkpoint: Path, group: Any) -> None:
        """Begin to upload a checkpoint of the disk, unless an upload is under way on any rank.

        `group`: the gloo group to agree on that, on which nothing else is under way.
        """
        ranks, name = self._disks.ranks, checkpoint.name
        if any(gather(ranks, self._in_flight, group)):
            self._outcomes.put(UploadOutcome(name, f"{self._under_way} is still under way: the bucket is slow", 0.0))
            return
        opened: OpenCheckpoint | None = None

        def open_files() -> None:
            nonlocal opened
            opened = self._open(checkpoint)

        try:
            together(ranks, open_files, group=group)
        except BadInput as error:
            self._outcomes.put(UploadOutcome(name, str(error), 0.0))
            return
        self._under_way = name
        self._thread = threading.Thread(target=self._run, args=[opened], name="uploader", daemon=True)
        self._thread.start()

    def catch_up(self, checkpoint: Path) -> None:
        """Begin to upload the checkpoint that a job resumes from; if the bucket has it, remove what a kill has left.

        Raises BadInput where the bucket has another one of its name.
        """

        def is_there() -> bool:
            if not holds(self.bucket, checkpoint):
                return False
            prune_bucket(self.bucket, checkpoint.name, best_name(checkpoint), self._keep)
            return True

        ranks = self._disks.ranks
        if not from_coordinator(ranks, is_there, group=ranks.download):
            self.offer(checkpoint, ranks.control)

    def ended(self) -> Iterator[UploadOutcome]:
        """Yield, without waiting, outcomes that were not yielded yet."""
        while not self._outcomes.empty():
            yield self._outcomes.get()

    def finish(self, newest: Path | None) -> None:
        """Wait until the newest checkpoint, and the best one, are uploaded, or have failed to be; end the lease.

        Raises what broke the group.
        """
        self._join()
        if newest is not None:
            for name in from_coordinator(self._disks.ranks, lambda: self._missing(newest), group=self._group):
                self.offer(newest.with_name(name), self._group)
                self._join()
        if self._lease is not None:
            self._lease.release()

    def _missing(self, newest: Path) -> list[str]:
        """Return the best checkpoint, if the bucket lacks it and this disk has it, and the newest, if it lacks that."""
        names = [] if self._complete == newest.name else [newest.name]
        with suppress(BadInput):  # of a bucket that does not answer, the upload says so
            best = best_name(newest)
            absent = best not in {newest.name, *complete_steps(self.bucket)}
            if best is not None and absent and is_folder(newest.with_name(best)):
                names.insert(0, best)
        return names

    @property
    def _in_flight(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _newest(self, name: str) -> str:
        """Return the newest checkpoint of this job in the bucket, once one of this name is there."""
        return max(name, self._complete or name)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _open(self, checkpoint: Path) -> OpenCheckpoint:
        """Open what this rank uploads: the files go to ranks of the first node, or of nodes that have them, too.

        Another node's client of a shared disk may not see a new file for a while.
        """
        ranks, node = self._disks.ranks, self._disks.ranks.node.size
        stride, senders = (1, node) if self._disks.shared else (node, ranks.world_size)
        mine = [file for place, file in enumerate(TENSOR_FILES) if place * stride % senders == ranks.rank]
        first = ranks.coordinates
        return OpenCheckpoint(
            name=checkpoint.name,
            tensors={file: (checkpoint / file).open("rb") for file in mine},
            small={file: (checkpoint / file).read_bytes() for file in (STATE, MANIFEST)} if first else {},
            best=best_name(checkpoint) if first else None,
        )

    def _run(self, opened: OpenCheckpoint) -> None:
        began = time.perf_counter()
        try:
            problem = self._upload(opened)
            if problem is None:
                self._complete = self._newest(opened.name)
            self._outcomes.put(UploadOutcome(opened.name, problem, time.perf_counter() - began))
        except Exception as error:  # noqa: BLE001  # a rank is gone: raised where training ends
            self._error = error
        finally:
            for file in opened.tensors.values():
                file.close()

    def _upload(self, opened: OpenCheckpoint) -> str | None:
        """Return the problem of any rank."""
        bucket, name = self.bucket, opened.name

        def claim() -> None:
            if self._lease is not None:
                self._lease.check()

        def send() -> None:
            for file, content in opened.tensors.items():
                bucket.upload(f"{name}/{file}", content)

        def complete() -> None:
            if self._lease is not None:  # on rank 0
                self._lease.check()
                complete_upload(bucket, name, opened.small)
                prune_bucket(bucket, self._newest(name), opened.best, self._keep)

        try:
            for work in (claim, send, complete):
                together(self._disks.ranks, functools.partial(_guarded, work), group=self._group)
        except BadInput as error:
            return str(error)
        return None


def _guarded(work: Callable[[], None]) -> None:
    """Do a part of an upload; any failure is raised as BadInput, so that the other ranks learn of it."""
    try:
        work()
    except BadInput:
        raise
    except Exception as error:  # of the client library, for one
        raise BadInput(f"{type(error).__name__}: {error}") from error
