"""Remote files: any URL that fsspec opens (s3://, gs://, https://, hf://), with every failure as one line.

s3fs, gcsfs and the hub's client retry errors that may pass; fsspec's http does not, so `ask` does.
"""

import glob
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar

from common.errors import BadInput

REMOTE = "://"
HTTP = ("http://", "https://")
BLOCK_BYTES = 1 << 22  # read-ahead: s3fs's own 50 MB would be read for every unit of 16
BUFFER_BYTES = 1 << 18
RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0)  # pauses before the next attempts
THREADS = 16  # requests at once, each mostly waiting
TRANSIENT = (408, 429, 500, 502, 503, 504)  # HTTP statuses
RERUN = "the same command goes on when it is there"

Answer = TypeVar("Answer")


def find_remote(name: str) -> dict[str, dict[str, Any]]:
    """Return a server's entries of the files behind a URL, by URL: one file's, a folder's, or a glob's.

    Over http a folder's name ends in a slash, and its page must list it. Raises BadInput.
    """
    file_system, inner = file_system_of(name)
    web = name.startswith(HTTP)

    def find() -> dict[str, dict[str, Any]]:
        magic = glob.has_magic(inner.replace("?", "") if web else inner)  # a URL's ? begins its query
        if magic and not file_system.isfile(inner):
            return file_system.glob(inner, detail=True)
        if name.endswith("/") if web else file_system.isdir(inner):  # http's isdir reads the file to its end
            return file_system.find(inner, detail=True)
        return {inner: file_system.info(inner)}

    found = ask(name, find)
    urls = {file_system.unstrip_protocol(path): entry for path, entry in found.items() if entry["type"] == "file"}
    if web:  # a page of links knows no sizes
        with ThreadPoolExecutor(THREADS) as threads:
            urls = dict(zip(urls, threads.map(look_up_remote, urls), strict=True))
    return urls


def look_up_remote(url: str) -> dict[str, Any]:
    """Return a server's current entry of a file. Raises BadInput."""
    file_system, inner = file_system_of(url)
    return ask(url, lambda: file_system.info(inner))


def open_remote(url: str) -> BinaryIO:
    """Open a file for reading, by ranges. Raises BadInput, then and whenever it cannot be read to its end."""
    return io.BufferedReader(_RemoteFile(url), BUFFER_BYTES)


def file_system_of(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the name in it. Raises BadInput naming a package that is missing."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise BadInput(f"{url}: {_detail(error)}: pip install it") from error
    except ValueError as error:
        raise BadInput(f"{url}: {_detail(error)}") from error


def ask(url: str, call: Callable[[], Answer], what: str = "read") -> Answer:
    """Return the result of a request to a server, repeated while errors are transient. Raises BadInput.

    `what` is done to the file, for the error: read, written or deleted.
    """
    for pause in (*RETRY_SECONDS, None):
        try:
            return call()
        except Exception as error:  # every library has errors of its own, and not all of them are OSErrors
            if pause is None or not (url.startswith(HTTP) and _is_transient(error)):
                raise BadInput(f"{url}: cannot be {what}: {_detail(error)}; {RERUN}") from error
            time.sleep(pause)
    raise AssertionError("the last attempt raises")


class _RemoteFile(io.RawIOBase):
    """A file of fsspec whose errors cannot be taken for those of a damaged file."""

    def __init__(self, url: str):
        self._url = url
        file_system, inner = file_system_of(url)
        self._stream = ask(url, lambda: file_system.open(inner, "rb", block_size=BLOCK_BYTES, cache_type="readahead"))
        if self._stream.size is None:
            raise BadInput(f"{url}: its server does not send parts of a file; download it first")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stream.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._stream.size - self._position))
        data = ask(self._url, lambda: self._read(wanted))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if hasattr(self, "_stream"):
                self._stream.close()

    def _read(self, count: int) -> bytes:
        self._stream.seek(self._position)  # again after an attempt that failed half-way
        data = self._stream.read(count)
        if len(data) != count:
            raise EOFError(f"got {len(data)} bytes at {self._position}, wanted {count}")
        return data


def _is_transient(error: BaseException) -> bool:
    from aiohttp import ClientConnectionError, ClientPayloadError, ClientResponseError
    from fsspec.exceptions import FSTimeoutError

    if isinstance(error, FileNotFoundError):  # fsspec's, whatever happened
        error = error.__cause__ or error
    if isinstance(error, ClientResponseError):
        return error.status in TRANSIENT
    return isinstance(error, (ClientConnectionError, ClientPayloadError, FSTimeoutError, EOFError))


def _detail(error: BaseException) -> str:
    """Return the first line of an error's text; of a FileNotFoundError its cause, which may be something else."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    said = str(cause or error)
    if isinstance(error, FileNotFoundError) and cause is None and " " not in said:  # only its name
        said = "not found"
    return said.splitlines()[0] if said else type(error).__name__
