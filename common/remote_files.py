"""Remote files: objects in a bucket, and files on the web and on the Hugging Face hub. Errors are one line each."""

import base64
import glob
import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from email.utils import format_datetime
from typing import Any, BinaryIO
from urllib.parse import urljoin

import attrs

from common.bucket import Bucket, StoredObject
from common.errors import BadInput
from common.files import BUCKET_SCHEMES
from common.hub_client import hub_errors

REMOTE = "://"
HTTP = ("http://", "https://")
HUB_FILES = "hf://"
READ_AHEAD_BYTES = 1 << 22  # size of the read buffer; documents are read in much larger units of about 16 MB
MOST_LINKS = 100_000  # maximum number of files and folders in the listing of a web server
THREADS = 16  # number of simultaneous requests; their threads mostly wait


@attrs.frozen
class RemoteFile:
    """A file on a server, in the version that it had when it was looked up."""

    url: str
    size_bytes: int
    stamp: str  # changes when the content changes
    e_tag: str | None = None

    def open(self) -> BinaryIO:
        """Open the file for reading. Its bytes are requested from the server in ranges.

        Opening and reading raise BadInput if the file cannot be read, or if it is no longer this version.
        """
        return io.BufferedReader(_Ranges(self), READ_AHEAD_BYTES)


def find_remote(name: str) -> dict[str, RemoteFile]:
    """Find the files that a URL names, and map the URL of each file to the file. Raises BadInput if none are found.

    The URL names a single file, a glob, or a folder. On the web, a folder ends with "/", and its page lists the files.
    """
    if name.startswith(HUB_FILES):
        return _find_on_hub(name)
    bucket, inner = _locate(name)
    web = name.startswith(HTTP)
    magic = glob.has_magic(name.replace("?", "") if web else inner)  # in a URL on the web, "?" begins the query
    if magic and not _is_there(bucket, inner):
        folder, pattern = re.split(r"[^/]*[*?[]", name, maxsplit=1)[0], re.compile(_expression(name))
    elif magic or (web and not name.endswith("/")):
        return {name: look_up_remote(name)}
    else:
        folder, pattern = f"{name.rstrip('/')}/", re.compile(".*")
    entries = {} if web else bucket.objects(folder.removeprefix(f"{bucket.url}/"))
    urls = _linked(folder) if web else [f"{bucket.url}/{path}" for path in entries]
    matches = [url for url in urls if pattern.fullmatch(url)]
    if not matches and not magic:
        matches = [name]
    elif entries and not name.startswith("gs://"):  # Google's lists do not include versions
        return {url: _remote_file(url, entries[url.removeprefix(f"{bucket.url}/")]) for url in matches}
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(matches, threads.map(look_up_remote, matches), strict=True))


def look_up_remote(url: str) -> RemoteFile:
    """Return the current state of a file. Raises BadInput if it cannot be read."""
    if url.startswith(HUB_FILES):
        with hub_errors(f"{url}: cannot be read", "read"):
            return _hub_file(url, _hub().info(url))
    bucket, name = _locate(url)
    return _remote_file(url, bucket.look_up(name))


def read_web_file(url: str) -> bytes:
    """Return the content of a small file on the web. Raises BadInput if it cannot be read."""
    version = Bucket(url).read("")
    if version is None:
        raise BadInput(f"{url}: cannot be read: not found")
    return version.content


class _Ranges(io.RawIOBase):
    """A remote file as a file object. Its errors are BadInput, so that no caller concludes that the file is damaged."""

    def __init__(self, file: RemoteFile):
        self._file, self._position = file, 0
        self._bucket, self._name = _locate(file.url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._file.size_bytes)
        if end <= self._position:
            return 0
        data = self._bucket.read_range(self._name, self._position, end, self._file.e_tag)
        buffer[: len(data)] = data
        self._position = end
        return len(data)


def _locate(url: str) -> tuple[Bucket, str]:
    """Return the bucket of a URL, and the name of the object in it."""
    scheme, _, rest = url.partition(REMOTE)
    if scheme in BUCKET_SCHEMES:
        name, _, inner = rest.partition("/")
        return Bucket(f"{scheme}://{name}"), inner.strip("/")
    if url.startswith(HUB_FILES):
        from huggingface_hub import get_token

        token = get_token()
        with hub_errors(f"{url}: cannot be read", "read"):
            address = _hub().url(url)  # this asks the hub for the commit of a revision
        return Bucket(address, {} if token is None else {"authorization": f"Bearer {token}"}), ""
    return Bucket(url), ""


def _is_there(bucket: Bucket, name: str) -> bool:
    try:
        bucket.look_up(name)
    except BadInput as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise
    return True


def _remote_file(url: str, entry: StoredObject) -> RemoteFile:
    """Return a file with its stamp.

    The stamp has the form that fsspec's clients use. Earlier versions used these clients, so existing plans contain
    such stamps.
    """
    if url.startswith("gs://") and entry.version is not None:
        return RemoteFile(url, entry.size_bytes, f"etag {_google_tag(int(entry.version))}", entry.e_tag)
    if entry.e_tag is not None:
        tag = entry.e_tag.replace('"', "")
        return RemoteFile(url, entry.size_bytes, f"{'etag' if url.startswith('az://') else 'ETag'} {tag}", entry.e_tag)
    written_at = format_datetime(datetime.fromtimestamp(entry.written_at, timezone.utc), usegmt=True)
    return RemoteFile(url, entry.size_bytes, f"Last-Modified {written_at}" if entry.written_at else "no tag")


def _google_tag(generation: int) -> str:
    """Return the tag that Google's JSON interface gives an object with this generation and metageneration 1.

    The tag is a protocol buffer of these two numbers, in base64.
    """
    digits = []
    while generation > 127:
        digits.append(generation & 127 | 128)
        generation >>= 7
    return base64.b64encode(bytes([8, *digits, generation, 16, 1])).decode()


def _linked(top: str) -> Iterator[str]:
    """Yield the URLs of all files that a web server's page links to, directly or through folders. Raises BadInput.

    A page may link to the same folder many times, and a server may generate an endless number of folders.
    """
    folders, visited = [top], {top}
    while folders:
        folder = folders.pop()
        text = read_web_file(folder).decode(errors="replace")
        for link in re.findall(r"""<a\s[^>]*href=["']([^"'?#]+)["']""", text, re.IGNORECASE):
            url = urljoin(folder, link)
            if not url.startswith(folder) or url in visited:
                continue
            visited.add(url)
            if len(visited) > MOST_LINKS:
                raise BadInput(
                    f"{top}: its pages link to more than {MOST_LINKS:,} files and folders; name a folder below it"
                )
            if url.endswith("/"):
                folders.append(url)
            else:
                yield url


def _expression(pattern: str) -> str:
    """Convert a glob to a regular expression. `*` and `?` do not match "/", and `**/` matches any number of folders."""
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.findall(r"\*\*/|\*\*|\[!?[^]]+\]|.", pattern)
    return "".join(
        wildcards.get(part) or (part.replace("[!", "[^") if len(part) > 1 else re.escape(part)) for part in parts
    )


def _hub() -> Any:
    from huggingface_hub import HfFileSystem

    return HfFileSystem()


def _find_on_hub(name: str) -> dict[str, RemoteFile]:
    with hub_errors(f"{name}: cannot be read", "read"):
        hub, inner = _hub(), name.removeprefix(HUB_FILES)
        if glob.has_magic(inner) and not hub.isfile(inner):
            entries = hub.glob(inner, detail=True)
        else:
            entries = hub.find(inner, detail=True) if hub.isdir(inner) else {inner: hub.info(inner)}
        files = {f"{HUB_FILES}{path}": entry for path, entry in entries.items() if entry["type"] == "file"}
        return {url: _hub_file(url, entry) for url, entry in files.items()}


def _hub_file(url: str, entry: dict[str, Any]) -> RemoteFile:
    return RemoteFile(url, int(entry["size"]), f"blob_id {entry['blob_id']}")
