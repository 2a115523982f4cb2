"""Bucket: the objects under one prefix of S3, Google Cloud Storage or Azure, by obstore. Every failure is one line.

Credentials come from the environment or the machine's role, never from a URL. Retries are bounded: a request that fails
for good raises within RETRY_SECONDS and a request's own time.
"""

import functools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

import attrs

from common.errors import BadInput

if TYPE_CHECKING:
    from obstore import GetOptions, UpdateVersion

SCHEMES = ("s3", "gs", "az")
RETRY_SECONDS = 60.0  # after which a request is not tried again
REQUEST_SECONDS = 60.0  # of one request; it moves a piece at most
PIECE_BYTES = 1 << 24  # of an upload in parts, and of a download
PIECES_AT_ONCE = 8  # held in memory

Answer = TypeVar("Answer")


@attrs.frozen
class Version:
    """Content of a small object, and what identifies it in a conditional write."""

    content: bytes
    tag: "UpdateVersion"


@attrs.frozen
class StoredObject:
    """An object as it is listed."""

    size_bytes: int
    written_at: float  # by the server's clock, in seconds since 1970
    e_tag: str | None  # None where the server has none


class Taken(BadInput):
    """A conditional write found another version than it was to replace."""


def is_bucket(url: str) -> bool:
    """Tell whether a URL is of a bucket, and has no credentials in it."""
    return re.fullmatch(rf"({'|'.join(SCHEMES)})://[\w.-]+(/[\w./=+-]+)?", url) is not None


class Bucket:
    """The objects under a URL, SCHEME://BUCKET/PREFIX, by the rest of their names. Methods raise BadInput."""

    def __init__(self, url: str):
        try:
            import obstore.store
        except ImportError as error:
            raise BadInput(f"{url}: needs obstore: pip install obstore") from error
        self.url = url.rstrip("/")
        wait = timedelta(seconds=REQUEST_SECONDS)
        local = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        self._store = self._ask(
            "",
            "opened",
            lambda: obstore.store.from_url(
                self.url,
                client_options={"timeout": wait, "connect_timeout": timedelta(seconds=10), "allow_http": local},
                retry_config={"retry_timeout": timedelta(seconds=RETRY_SECONDS)},
            ),
        )

    def objects(self, prefix: str = "") -> dict[str, StoredObject]:
        """Return each object whose name begins with a prefix of whole folders."""
        import obstore

        def find() -> dict[str, StoredObject]:
            entries = (entry for page in obstore.list(self._store, prefix.rstrip("/") or None) for entry in page)
            return {
                entry["path"]: StoredObject(entry["size"], entry["last_modified"].timestamp(), entry["e_tag"])
                for entry in entries
            }

        return self._ask(prefix, "listed", find)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the bytes of each of these objects."""
        return {name: found.size_bytes for name, found in self.objects(prefix).items()}

    def read(self, name: str) -> Version | None:
        """Return a small object; None where there is none."""
        import obstore

        try:
            got = self._ask(name, "read", lambda: obstore.get(self._store, name))
            content = self._ask(name, "read", lambda: bytes(got.bytes()))
        except BadInput as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        return Version(content, _tag(got.meta))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, all of it or nothing, in the place of any other."""
        import obstore

        self._ask(name, "written", lambda: obstore.put(self._store, name, content, use_multipart=False))

    def replace(self, name: str, content: bytes, before: Version | None) -> Version:
        """Write a small object in the place of a version, or of none; return the new one. Raises Taken for another."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError

        mode: Literal["create"] | UpdateVersion = "create" if before is None else before.tag
        try:
            result = self._ask(name, "written", lambda: obstore.put(self._store, name, content, mode=mode))
        except BadInput as error:
            if not isinstance(error.__cause__, (AlreadyExistsError, PreconditionError, NotFoundError)):
                raise
            there = self.read(name)
            if there is None or there.content != content:  # else it is ours: an answer was lost, and it was tried again
                raise Taken(f"{self.url}/{name}: another process has written it") from error
            return there
        return Version(content, _tag(result))

    def upload(self, name: str, file: BinaryIO) -> None:
        """Write an object of any size from a file, in parts; it appears when all have arrived."""
        import obstore

        put = functools.partial(obstore.put, chunk_size=PIECE_BYTES, max_concurrency=PIECES_AT_ONCE)
        self._ask(name, "written", lambda: put(self._store, name, file))

    def pieces(self, name: str, size_bytes: int, e_tag: str | None = None) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset in bytes, content) of an object's pieces, in order. Raises Taken where its tag is another."""
        import obstore
        from obstore.exceptions import PreconditionError

        def fetch(offset: int) -> tuple[int, memoryview]:
            options: GetOptions = {"range": (offset, min(offset + PIECE_BYTES, size_bytes))}
            if e_tag is not None:
                options["if_match"] = e_tag
            try:
                request = functools.partial(obstore.get, self._store, name, options=options)
                return offset, memoryview(self._ask(name, "read", lambda: request().bytes()))
            except BadInput as error:
                if not isinstance(error.__cause__, PreconditionError):
                    raise
                raise Taken(f"{self.url}/{name}: was replaced during the download; rerun the same command") from error

        offsets = range(0, size_bytes, PIECE_BYTES)
        with ThreadPoolExecutor(PIECES_AT_ONCE) as threads:
            for first in offsets[::PIECES_AT_ONCE]:
                yield from threads.map(fetch, range(first, size_bytes, PIECE_BYTES)[:PIECES_AT_ONCE])

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; those that are gone already count as deleted."""
        import obstore

        if names:
            self._ask(min(names), "deleted", lambda: obstore.delete(self._store, list(names)))

    def _ask(self, name: str, done: str, request: Callable[[], Answer]) -> Answer:
        """Return the answer to a request. `done`: to the object, for the error."""
        from obstore.exceptions import BaseError

        try:
            return request()
        except (BaseError, ValueError, OSError) as error:
            where = f"{self.url}/{name}" if name else self.url
            raise BadInput(f"{where}: cannot be {done}: {_reason(error)}") from error


def _tag(found: Mapping[str, Any]) -> "UpdateVersion":
    """Return what a store tells versions apart by; obstore refuses None."""
    return {key: found[key] for key in ("e_tag", "version") if found[key] is not None}  # type: ignore[return-value]


def _reason(error: Exception) -> str:
    """Return why a request failed: the server's own words where it has answered."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    answer = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)(</Message>|$)", text)
    return f"{answer[1]}: {answer[2]}" if answer else f"{text[:300]}; check network and credentials"
