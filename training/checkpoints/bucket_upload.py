"""Upload of checkpoints to a bucket by rank 0, behind the training: whole, from its disk, one at a time.

A bucket that is slower than the checkpoints gets fewer of them; one that fails gets the next one. Training waits for it
at its end only.

One job uploads to a prefix: its lease, `lease.json`, names the job, which renews it; an old one may be taken. No clocks
are compared: whoever wants a lease watches whether it is renewed. All writes of it are conditional on the version seen
before, so that of two jobs one gets it.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from uuid import uuid4

import attrs

from common.bucket import Bucket, Version, VersionConflict
from common.errors import BadInput
from common.files import is_folder
from common.json_files import parse_json
from common.launch import boot_id
from common.output import advisory, show
from training.checkpoints.directory import MANIFEST, STATE, TENSOR_FILES, step_of
from training.checkpoints.lookup import complete_steps
from training.checkpoints.retention import prune_bucket
from training.checkpoints.saved_state import best_name, parse_state, read_state
from training.config.train_config import Run
from training.parallel.process_group import Ranks, from_coordinator

LEASE = "lease.json"
RENEW_SECONDS = 20.0
EXPIRY_SECONDS = 90.0  # without a renewal; a request and its retries may take this long
LEASE_POLL_SECONDS = 5.0


@attrs.frozen
class UploadOutcome:
    name: str
    problem: str | None  # one line; None: the checkpoint is complete in the bucket
    seconds: float


class Uploader:
    """Uploads to one prefix. Every rank has one; rank 0's claims the prefix and uploads."""

    def __init__(self, url: str, run: Run, ranks: Ranks):
        """Claim a prefix of a bucket, on every rank. Raises BadInput where it cannot be used, or another job has it."""
        self.bucket, self._keep, self._ranks = Bucket(url), run.train.checkpoints.keep_checkpoints, ranks
        self._lease: BucketLease | None = None  # of rank 0
        self._thread: threading.Thread | None = None
        self._outcomes: SimpleQueue[UploadOutcome] = SimpleQueue()  # not reported yet
        self._complete: str | None = None  # newest checkpoint of this job in the bucket
        self.failed = False  # the last upload of this rank

        def claim() -> None:
            self._lease = BucketLease(self.bucket, run.directory)

        from_coordinator(ranks, claim, group=ranks.download)

    def offer(self, checkpoint: Path) -> None:
        """Begin to upload a checkpoint of the disk, unless an upload is under way; on other ranks than 0 do nothing."""
        if self._lease is None:
            return
        if self._thread is not None and self._thread.is_alive():
            problem = f"{self._thread.name} is still under way: the bucket is slow"
            self._outcomes.put(UploadOutcome(checkpoint.name, problem, 0.0))
            return
        opened = threading.Event()
        arguments = [self._lease, checkpoint, opened]
        self._thread = threading.Thread(target=self._run, args=arguments, name=checkpoint.name, daemon=True)
        self._thread.start()
        opened.wait()

    def catch_up(self, checkpoint: Path) -> None:
        """Upload a resumed checkpoint, or prune, on every rank. Raises BadInput where the bucket has another."""

        def work() -> None:
            if _holds(self.bucket, checkpoint):
                position = read_state(checkpoint).position
                prune_bucket(self.bucket, position.step, position.best_step, self._keep)
            else:
                self.offer(checkpoint)

        from_coordinator(self._ranks, work, group=self._ranks.download)

    def ended(self) -> Iterator[UploadOutcome]:
        """Yield, without waiting, outcomes that were not yielded yet; on rank 0 alone there are any."""
        while not self._outcomes.empty():
            yield self._outcomes.get()

    def finish(self, newest: Path | None) -> None:
        """Upload the newest and the best checkpoint, where missing; wait; end the lease. Call it on every rank."""

        def work() -> None:
            self._join()
            for checkpoint in () if newest is None else self._missing(newest):
                self.offer(checkpoint)
                self._join()
            assert self._lease is not None
            self._lease.release()

        from_coordinator(self._ranks, work, group=self._ranks.download)

    def _missing(self, newest: Path) -> list[Path]:
        """Return the best checkpoint, if the bucket lacks it and this disk has it, and the newest, if it lacks that."""
        missing = [] if self._complete == newest.name else [newest]
        with suppress(BadInput):  # of a bucket that does not answer, the upload says so
            best = best_name(newest)
            absent = best not in {newest.name, *complete_steps(self.bucket)}
            if best is not None and absent and is_folder(newest.with_name(best)):
                missing.insert(0, newest.with_name(best))
        return missing

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, lease: "BucketLease", checkpoint: Path, opened: threading.Event) -> None:
        began, problem = time.perf_counter(), None
        try:
            self._upload(lease, checkpoint, opened)
        except Exception as error:  # noqa: BLE001  # of the disk or the client library: training goes on
            problem = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
        opened.set()
        self.failed = problem is not None
        self._outcomes.put(UploadOutcome(checkpoint.name, problem, time.perf_counter() - began))

    def _upload(self, lease: "BucketLease", checkpoint: Path, opened: threading.Event) -> None:
        """Upload a checkpoint. `opened`: set once its files are open, as the disk's retention may delete them then."""
        name = checkpoint.name
        with ExitStack() as files:
            tensors = {file: files.enter_context((checkpoint / file).open("rb")) for file in TENSOR_FILES}
            small = {file: (checkpoint / file).read_bytes() for file in (STATE, MANIFEST)}
            best = read_state(checkpoint).position.best_step
            opened.set()
            lease.check()
            for file, content in tensors.items():
                self.bucket.upload(f"{name}/{file}", content)
        lease.check()
        self.bucket.write(f"{name}/{STATE}", small[STATE])
        manifest = f"{name}/{MANIFEST}"  # last: after a kill in between `fetch` takes an older checkpoint
        self.bucket.replace(manifest, small[MANIFEST], self.bucket.read(manifest))
        newest = max(name, self._complete or name)  # the best one may come after it
        prune_bucket(self.bucket, step_of(newest), best, self._keep)
        self._complete = newest


class BucketLease:
    """Claim of this job on a bucket prefix, renewed by a thread until `release`; for rank 0."""

    def __init__(self, bucket: Bucket, run_directory: Path):
        """Take the lease, and print a line when that takes a while. Raises BadInput while another job holds it."""
        self._bucket = bucket
        # Name of the run directory on this machine; another boot is another machine, of the same name
        self._holder = f"{socket.gethostname()}:{run_directory.resolve()} {boot_id()}".strip()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._version: Version | None = self._write(self._free())  # None: another job has taken it
        threading.Thread(target=self._renew, name="bucket lease", daemon=True).start()

    def check(self) -> None:
        """Renew the lease. Raises VersionConflict where another job has it: this one's uploads end."""
        with self._lock:
            try:
                self._version = None if self._version is None else self._write(self._version)
            except VersionConflict:
                self._version = None
            if self._version is None:
                raise VersionConflict(
                    f"{self._bucket.url}: another job uploads there now, as this one's lease was not renewed in time; "
                    "stop one of the two"
                )

    def release(self) -> None:
        """End the lease, for the next job; if that fails, it has to wait."""
        self._ended.set()
        with self._lock, suppress(BadInput):
            if self._version is not None:
                self._bucket.delete([LEASE])

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with advisory("lease of the bucket"), suppress(BadInput):  # the next upload says so
                self.check()

    def _free(self) -> Version | None:
        """Return the version to replace, once it has expired or is of this run directory, which only one job locks."""
        before = self._bucket.read(LEASE)
        if before is None or _name(before) == self._holder:
            return before
        show(f"{self._bucket.url}: waiting {EXPIRY_SECONDS:.0f} s: {_name(before)} held it last")
        deadline = time.monotonic() + EXPIRY_SECONDS
        while time.monotonic() < deadline:
            time.sleep(LEASE_POLL_SECONDS)
            now = self._bucket.read(LEASE)
            if now is None:
                return None
            if now.tag != before.tag:
                raise BadInput(
                    f"{self._bucket.url}: another job uploads there: {_name(now)}; stop it, or set checkpoints to "
                    "another prefix"
                )
        return before

    def _write(self, before: Version | None) -> Version:
        content = json.dumps({"holder": self._holder, "renewal": uuid4().hex})
        return self._bucket.replace(LEASE, content.encode(), before)


def _name(version: Version) -> str:
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(version.content)["holder"])
    return "an unknown job"


def _holds(bucket: Bucket, checkpoint: Path) -> bool:
    """Return whether a bucket has a checkpoint of the disk, with an intact state.

    Raises BadInput if the bucket's checkpoint of that name is from another run.
    """
    state = bucket.read(f"{checkpoint.name}/{STATE}")
    if state is None or checkpoint.name not in complete_steps(bucket):
        return False
    try:
        theirs = parse_state(parse_json(state.content)).state_sha256
    except (ValueError, KeyError, TypeError):
        return False
    if theirs != read_state(checkpoint).state_sha256:
        raise BadInput(
            f"{bucket.url}/{checkpoint.name}: of another run than {checkpoint}: state_sha256 differs; set checkpoints "
            "to another prefix, or move those of the disk away"
        )
    return True
