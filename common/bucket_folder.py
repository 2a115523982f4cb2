"""Bucket folder: the objects under one prefix of an S3 bucket, written whole and verified to have arrived."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import BadInput
from common.files import sha256_of
from common.remote_files import THREADS, ask, file_system_of, open_remote

PART_BYTES = 1 << 24  # part of a multipart upload
PARTS_AT_ONCE = 4  # held in memory
UPLOADS = 3  # attempts with a file that arrives damaged


class BucketFolder:
    """The objects directly under one prefix, by their names there. Every method raises BadInput."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._files, root = file_system_of(self.url)
        self._root = root.rstrip("/")

    def names(self) -> list[str]:
        found = ask(self.url, lambda: self._files.find(self._root))
        return [name for path in found if "/" not in (name := path.removeprefix(f"{self._root}/"))]

    def read(self, name: str) -> bytes:
        return ask(f"{self.url}/{name}", lambda: self._files.cat_file(self._path(name)))

    def open(self, name: str) -> BinaryIO:
        return open_remote(f"{self.url}/{name}")

    def sha256(self, name: str) -> str:
        """Return the sha256 of an object, read to its end."""
        with self.open(name) as stream:
            return sha256_of(stream)

    def written_at(self, name: str) -> float:
        """Return when an object was written, by the server's clock, in seconds since 1970."""
        return self._entry(name)["LastModified"].timestamp()

    def write(self, name: str, data: bytes, **options: Any) -> None:
        """Write an object, all of it or nothing."""
        ask(f"{self.url}/{name}", lambda: self._files.pipe_file(self._path(name), data, **options), "written")

    def create(self, name: str, data: bytes, exists: str) -> None:
        """Write a new object; `exists`: advice in the error if another process has written it."""
        try:
            self.write(name, data, mode="create")
        except BadInput as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
            if self.read(name) != data:  # else it is ours: the answer to the first attempt was lost
                raise BadInput(f"{self.url}/{name}: exists: {exists}") from error

    def upload(self, path: Path, sha256: str) -> None:
        """Write a file under its own name, and verify that the object has its sha256."""
        url, tag = f"{self.url}/{path.name}", _tag(path)
        options = {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
        for _ in range(UPLOADS):
            ask(url, lambda: self._files.put_file(str(path), self._path(path.name), **options), "written")
            if self._arrived(path, sha256, tag):
                return
        raise BadInput(f"{url}: arrived damaged {UPLOADS} times; check the network, then rerun the same command")

    def copy(self, names: dict[str, str]) -> Iterator[str]:
        """Copy objects to other names, on the server; yield each that is done."""
        return self._each(self._copy, names.items())

    def delete(self, names: Iterable[str]) -> Iterator[str]:
        """Delete objects; yield each that is gone."""
        return self._each(self._delete, names)

    def _arrived(self, path: Path, sha256: str, tag: str) -> bool:
        """Tell whether an object equals the file, by the server's tag if that is the md5, or else by reading it."""
        entry = self._entry(path.name)
        if entry["size"] != path.stat().st_size:
            return False
        if str(entry.get("ETag")).strip('"') == tag:
            return True
        try:
            return self.sha256(path.name) == sha256
        except BadInput:  # the server's own checksum differs
            return False

    def _copy(self, pair: tuple[str, str]) -> str:
        name, final = pair
        ask(f"{self.url}/{final}", lambda: self._files.cp_file(self._path(name), self._path(final)), "written")
        got, wanted = self._entry(final)["size"], self._entry(name)["size"]
        if got != wanted:
            raise BadInput(f"{self.url}/{final}: got {got:,} bytes, wanted {wanted:,} as in {name}; try again")
        return final

    def _delete(self, name: str) -> str:
        ask(f"{self.url}/{name}", lambda: self._files.rm_file(self._path(name)), "deleted")
        return name

    def _each(self, work: Callable[[Any], str], items: Iterable[Any]) -> Iterator[str]:
        with ThreadPoolExecutor(THREADS) as threads:
            yield from threads.map(work, items)

    def _entry(self, name: str) -> dict[str, Any]:
        return ask(f"{self.url}/{name}", lambda: self._files.info(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _tag(path: Path) -> str:
    """Return S3's ETag of a file: its md5, or for one that is sent in parts, that of their md5s."""
    digests = []
    with path.open("rb") as file:
        while data := file.read(PART_BYTES):
            digests.append(hashlib.md5(data).digest())
    if path.stat().st_size < 2 * PART_BYTES:  # s3fs sends it at once
        return hashlib.md5(path.read_bytes()).hexdigest()
    return f"{hashlib.md5(b''.join(digests)).hexdigest()}-{len(digests)}"
