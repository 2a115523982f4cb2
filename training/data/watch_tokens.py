"""Watch over token files while a run reads them: changed content ends the run, a new modification time does not."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._threads = ThreadPoolExecutor(HASHED_AT_ONCE, thread_name_prefix="token hash")
        self._hashing: dict[Path, tuple[Version, Future[str]]] = {}  # with the version before it was read

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
                self._hashing[path] = now, self._threads.submit(sha256, path)
            version, digest = self._hashing[path]
            if not wait and not digest.done():
                continue
            del self._hashing[path]
            with suppress(OSError):  # unreadable now: reading its tokens raises the error
                if digest.result() != self._digests[path]:
                    raise _written(path)
                self._versions[path] = version
                touched.append(path)
        return touched


def _written(path: Path) -> BadInput:
    return BadInput(
        f"{path}: was written while the run read it; put it back as it was, then rerun the same command, "
        "which continues from the last checkpoint",
        alone=True,
    )
