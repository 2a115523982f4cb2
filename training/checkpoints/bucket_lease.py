"""Lease of a bucket prefix: one job uploads there. An object names the job, which renews it; an old one may be taken.

No clocks are compared: whoever wants a lease watches whether it is renewed. All writes are conditional on the version
seen before, so that of two jobs one gets it.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from common.bucket import Bucket, Taken, Version
from common.errors import BadInput, advisory

LEASE = "lease.json"
RENEW_SECONDS = 20.0
EXPIRY_SECONDS = 90.0  # without a renewal; a request and its retries may take this long
LEASE_POLL_SECONDS = 5.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class BucketLease:
    """Claim of this job on a bucket prefix, renewed by a thread until `release`; for rank 0."""

    def __init__(self, bucket: Bucket, run_directory: Path, say: Callable[[str], object]):
        """Take the lease. `say` is told when that takes a while. Raises BadInput while another job holds it."""
        self._bucket = bucket
        self._holder = _holder(run_directory)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._version: Version | None = self._write(self._free(say))  # None: another job has taken it
        threading.Thread(target=self._renew, name="bucket lease", daemon=True).start()

    def check(self) -> None:
        """Renew the lease. Raises Taken where another job has it: this one's uploads end."""
        with self._lock:
            try:
                self._version = None if self._version is None else self._write(self._version)
            except Taken:
                self._version = None
            if self._version is None:
                raise Taken(
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

    def _free(self, say: Callable[[str], object]) -> Version | None:
        """Return the version to replace, once it has expired or is of this run directory, which only one job locks."""
        before = self._bucket.read(LEASE)
        if before is None or _name(before) == self._holder:
            return before
        say(f"{self._bucket.url}: waiting {EXPIRY_SECONDS:.0f} s: {_name(before)} held it last")
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


def _holder(run_directory: Path) -> str:
    """Return the name of a run directory on this machine; another boot is another machine, of the same name."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{socket.gethostname()}:{run_directory.resolve()} {boot}".strip()


def _name(version: Version) -> str:
    """Return the holder of a lease."""
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(version.content)["holder"])
    return "an unknown job"
