"""Upload of checkpoints to a bucket. Rank 0 uploads complete checkpoints from its disk, one at a time, in a thread.

A checkpoint that is saved while another one is still being uploaded is not uploaded. If an upload fails, the next
checkpoint is uploaded as usual. Training waits for uploads only at its end.

Only one job at a time uploads to a prefix of a bucket. It holds a lease: the object `lease.json`, which names the job,
and which the job renews regularly. Another job may take over a lease that is no longer renewed. No clocks are compared:
a job that wants the lease watches whether it is renewed. A job writes the lease only if the object has not changed
since the job read it, so that only one of two jobs gets the lease.
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
# A lease expires if it is not renewed for this long. The time is enough for one request and its retries.
EXPIRY_SECONDS = 90.0
LEASE_POLL_SECONDS = 5.0


@attrs.frozen
class UploadOutcome:
    name: str
    problem: str | None  # one line that says why the checkpoint is not in the bucket; None if it is there
    seconds: float


class Uploader:
    """Uploads checkpoints to one prefix of a bucket. Every rank has an uploader, but only rank 0's does the work."""

    def __init__(self, url: str, run: Run, ranks: Ranks):
        """Claim the prefix; call this on every rank.

        Raises BadInput if the prefix cannot be used, or if another job has claimed it.
        """
        self.bucket, self._keep, self._ranks = Bucket(url), run.train.checkpoints.keep_checkpoints, ranks
        self._lease: BucketLease | None = None  # only on rank 0
        self._thread: threading.Thread | None = None
        self._outcomes: SimpleQueue[UploadOutcome] = SimpleQueue()  # outcomes that have not been reported yet
        self._complete: str | None = None  # the newest checkpoint of this job that is complete in the bucket
        self.failed = False  # whether the last upload of this rank failed

        def claim() -> None:
            self._lease = BucketLease(self.bucket, run.directory)

        from_coordinator(ranks, claim, group=ranks.download)

    def offer(self, checkpoint: Path) -> None:
        """Start to upload a checkpoint from the disk, unless another upload is running. Only rank 0 does anything."""
        if self._lease is None:
            return
        if self._thread is not None and self._thread.is_alive():
            problem = f"{self._thread.name} is still being uploaded, because the bucket is slow"
            self._outcomes.put(UploadOutcome(checkpoint.name, problem, 0.0))
            return
        opened = threading.Event()
        arguments = [self._lease, checkpoint, opened]
        self._thread = threading.Thread(target=self._run, args=arguments, name=checkpoint.name, daemon=True)
        self._thread.start()
        opened.wait()

    def catch_up(self, checkpoint: Path) -> None:
        """Upload the checkpoint from which the run resumes; if the bucket has it already, only prune the bucket.

        Call it on every rank. Raises BadInput if the bucket has a checkpoint of that name from another run.
        """

        def work() -> None:
            if _is_uploaded(self.bucket, checkpoint):
                position = read_state(checkpoint).position
                prune_bucket(self.bucket, position.step, position.best_step, self._keep)
            else:
                self.offer(checkpoint)

        from_coordinator(self._ranks, work, group=self._ranks.download)

    def ended(self) -> Iterator[UploadOutcome]:
        """Yield the outcomes since the last call, without waiting for more. Only rank 0 has any."""
        while not self._outcomes.empty():
            yield self._outcomes.get()

    def finish(self, newest: Path | None) -> None:
        """Upload the newest and the best checkpoint if the bucket does not have them, and release the lease.

        Waits for running uploads. Call it on every rank.
        """

        def work() -> None:
            self._join()
            for checkpoint in () if newest is None else self._missing(newest):
                self.offer(checkpoint)
                self._join()
            assert self._lease is not None
            self._lease.release()

        from_coordinator(self._ranks, work, group=self._ranks.download)

    def _missing(self, newest: Path) -> list[Path]:
        """Of the best and the newest checkpoint, return those that are on this disk but not in the bucket."""
        missing = [] if self._complete == newest.name else [newest]
        with suppress(BadInput):  # if the bucket does not answer, the upload of the newest checkpoint reports that
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
        except Exception as error:  # noqa: BLE001  # errors of the disk or the client library must not end training
            problem = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
        opened.set()
        self.failed = problem is not None
        self._outcomes.put(UploadOutcome(checkpoint.name, problem, time.perf_counter() - began))

    def _upload(self, lease: "BucketLease", checkpoint: Path, opened: threading.Event) -> None:
        """Upload a checkpoint. Set `opened` once all its files are open; from then on, the files may be deleted."""
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
        # The manifest comes last. If this upload is killed before that, `fetch` takes an older checkpoint.
        manifest = f"{name}/{MANIFEST}"
        self.bucket.replace(manifest, small[MANIFEST], self.bucket.read(manifest))
        newest = max(name, self._complete or name)  # the best checkpoint may be uploaded after a newer one
        prune_bucket(self.bucket, step_of(newest), best, self._keep)
        self._complete = newest


class BucketLease:
    """This job's claim to a prefix of a bucket. A thread renews the lease until `release`. Only rank 0 has a lease."""

    def __init__(self, bucket: Bucket, run_directory: Path):
        """Take the lease, and print a line if this takes long. Raises BadInput if another job holds the lease."""
        self._bucket = bucket
        # Host name, run directory and boot id identify the holder. The boot id is included because another machine may
        # have the same host name. As a consequence, a machine counts as a different one after a reboot.
        self._holder = f"{socket.gethostname()}:{run_directory.resolve()} {boot_id()}".strip()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._version: Version | None = self._write(self._wait_until_free())  # None: another job has taken the lease
        threading.Thread(target=self._renew, name="bucket lease", daemon=True).start()

    def check(self) -> None:
        """Renew the lease. Raises VersionConflict if another job has taken it; this job must then stop uploading."""
        with self._lock:
            try:
                self._version = None if self._version is None else self._write(self._version)
            except VersionConflict:
                self._version = None
            if self._version is None:
                raise VersionConflict(
                    f"{self._bucket.url}: another job now uploads to this prefix, because this job could not renew its "
                    "lease in time; stop one of the two jobs"
                )

    def release(self) -> None:
        """End the lease, so that the next job need not wait until it expires."""
        self._ended.set()
        with self._lock, suppress(BadInput):
            if self._version is not None:
                self._bucket.delete([LEASE])

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with advisory("lease of the bucket"), suppress(BadInput):  # the next upload reports the same problem
                self.check()

    def _wait_until_free(self) -> Version | None:
        """Return the version of the lease that this job may replace. If another job holds it, wait until it expires.

        A lease of an earlier job of this run directory is returned at once, because only one job can lock a directory.
        """
        first_version = self._bucket.read(LEASE)
        if first_version is None or _holder_of(first_version) == self._holder:
            return first_version
        holder = _holder_of(first_version)
        show(f"{self._bucket.url}: last used by {holder}; waiting {EXPIRY_SECONDS:.0f} s to see if that job is alive")
        deadline = time.monotonic() + EXPIRY_SECONDS
        while time.monotonic() < deadline:
            time.sleep(LEASE_POLL_SECONDS)
            version = self._bucket.read(LEASE)
            if version is None:
                return None
            if version.tag != first_version.tag:
                raise BadInput(
                    f"{self._bucket.url}: another job uploads to this prefix: {_holder_of(version)}; stop that job, or "
                    'set "checkpoints" to another prefix'
                )
        return first_version

    def _write(self, previous: Version | None) -> Version:
        content = json.dumps({"holder": self._holder, "renewal": uuid4().hex})
        return self._bucket.replace(LEASE, content.encode(), previous)


def _holder_of(version: Version) -> str:
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(version.content)["holder"])
    return "an unknown job"


def _is_uploaded(bucket: Bucket, checkpoint: Path) -> bool:
    """Return whether a checkpoint on the disk has a complete copy, with an intact state, in a bucket.

    Raises BadInput if the bucket's checkpoint of that name is from another run.
    """
    state = bucket.read(f"{checkpoint.name}/{STATE}")
    if state is None or checkpoint.name not in complete_steps(bucket):
        return False
    try:
        bucket_sha256 = parse_state(parse_json(state.content)).state_sha256
    except (ValueError, KeyError, TypeError):
        return False
    if bucket_sha256 != read_state(checkpoint).state_sha256:
        raise BadInput(
            f"{bucket.url}/{checkpoint.name}: not the same checkpoint as {checkpoint}, because state_sha256 differs; "
            'set "checkpoints" to another prefix, or move away the checkpoints that are on the disk'
        )
    return True
