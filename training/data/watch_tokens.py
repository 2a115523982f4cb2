"""Watch over token files while a run reads them: changed content ends the run, a new modification time does not."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from common.errors import BadInput
from common.files import sha256
from tokens.format.token_file import TokenStream, Version, version_of

HASHED_AT_ONCE = 4  # files


class TokenWatch:
    """Checks this rank's files and hashes in threads, so that no rank waits for the disk of another."""

    def __init__(self, streams: Sequence[TokenStream], digests: dict[Path, str]):
        """`digests`: the sha256 of each file before the first step."""
        self._versions = {path: version for stream in streams for path, version in stream.versions.items()}
        self._digests = digests
        self._hashing: dict[Path, _Hashing] = {}

    def check(self, *, wait: bool) -> list[Path]:
        """Return files whose modification time changed, but not their content; `wait`: for the hash of every one.

        Raises BadInput, on this rank alone, for a file whose content changed.
        """
        touched = []
        for path, before in self._versions.items():
            now = version_of(path)
            if now in (before, None):  # a deleted file that is open can be read
                continue
            if before is None or now[0] != before[0] or path not in self._digests:
                raise _written(path)
            if path not in self._hashing:
                if len(self._hashing) == HASHED_AT_ONCE and not wait:
                    continue
                self._hashing[path] = _Hashing(path, now)
            hashing = self._hashing[path]
            if not hashing.ended(wait=wait):
                continue
            del self._hashing[path]
            if hashing.digest is None:  # unreadable now: reading its tokens raises the error
                continue
            if hashing.digest != self._digests[path]:
                raise _written(path)
            self._versions[path] = hashing.version
            touched.append(path)
        return touched


class _Hashing:
    def __init__(self, path: Path, version: Version):
        self.version = version  # before it was read
        self.digest: str | None = None
        self._path = path
        self._thread = threading.Thread(target=self._run, name="token hash", daemon=True)
        self._thread.start()

    def ended(self, *, wait: bool) -> bool:
        self._thread.join(None if wait else 0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError):
            self.digest = sha256(self._path)


def _written(path: Path) -> BadInput:
    return BadInput(
        f"{path}: was written while the run read it; put it back as it was, then rerun the same command, "
        "which continues from the last checkpoint",
        alone=True,
    )
