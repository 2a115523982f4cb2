"""Objects under a prefix of S3, Google Cloud Storage or Azure, and files on the web, all read by obstore.

`store_of` alone decides which protocol and which credentials a URL gets. The scheme decides, never the host: a URL of
http or https is fetched by plain HTTP without any credentials, even if its host belongs to Amazon, Google or Microsoft.
"""

import configparser
import functools
import hashlib
import os
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

import attrs

from common.errors import BadInput
from common.files import BUCKET_SCHEMES, WEB_SCHEMES, is_bucket
from common.text import in_brackets

if TYPE_CHECKING:
    from obstore import GetOptions, UpdateVersion

RETRY_SECONDS = 60.0  # after which a request is not tried again
REQUEST_SECONDS = 60.0  # of one request; it moves a piece at most
PIECE_BYTES = 1 << 24  # of an upload in parts, and of a download
SMALL_BYTES = 1 << 26  # most of an object that is read at once
PIECES_AT_ONCE = 8  # held in memory
SAID_CHARACTERS = 300  # shown of a server's own words
ATTEMPTS = 4  # to read a range whose answer breaks off
UPLOADS = 3  # attempts with a file that arrives damaged
PROFILE_FILES = {  # of AWS, by the variable with another path; later ones go before
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
}
PROFILE_KEYS = {  # option of obstore: key of a profile, variables that go before it
    "access_key_id": ("aws_access_key_id", ["AWS_ACCESS_KEY_ID"]),
    "secret_access_key": ("aws_secret_access_key", ["AWS_ACCESS_KEY_ID"]),
    "session_token": ("aws_session_token", ["AWS_ACCESS_KEY_ID"]),
    "region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"]),
    "endpoint": ("endpoint_url", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"]),
}
METADATA_SERVICE, METADATA_SECONDS = ("169.254.169.254", 80), 1.0  # of Amazon, Google and Microsoft alike
CREDENTIALS = {  # by scheme of a bucket: variables that name credentials
    "s3": re.compile("AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|TOKEN|WEB_IDENTITY.*|CONTAINER.*)"),
    "gs": re.compile("GOOGLE_(SERVICE_ACCOUNT.*|APPLICATION_CREDENTIALS|BEARER_TOKEN)"),
    "az": re.compile("(AZURE|MSI|IDENTITY)_.*(KEY|SECRET|TOKEN|CLI|ENDPOINT|CLIENT_ID|EMULATOR).*"),
}
GOOGLE_FILE = Path("~/.config/gcloud/application_default_credentials.json")

Answer = TypeVar("Answer")


@attrs.frozen
class Version:
    """Content of a small object, and its tag for a conditional write."""

    content: bytes
    tag: "UpdateVersion"


@attrs.frozen
class StoredObject:
    """An object as it is listed."""

    size_bytes: int
    written_at: float  # by the server's clock, in seconds since 1970
    e_tag: str | None  # None where the server has none
    version: str | None  # None in lists, and where the server has none


class Taken(BadInput):
    """A conditional write or read found another version than it was of."""


class Bucket:
    """Objects under SCHEME://BUCKET/PREFIX; a web file's URL is a bucket of one, named "". Methods raise BadInput."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None):
        """`headers`: of each request to a web server."""
        try:
            import obstore
        except ImportError as error:
            raise BadInput(f"{url}: needs obstore: pip install obstore") from error
        self._client = obstore
        self.url = url.rstrip("/") if is_bucket(url.rstrip("/")) else url
        self._store = self._ask("", "opened", lambda: store_of(self.url, headers or {}))

    def objects(self, prefix: str = "") -> dict[str, StoredObject]:
        """Return each object whose name begins with a prefix of whole folders."""

        def find() -> dict[str, StoredObject]:
            pages = self._client.list(self._store, prefix.rstrip("/") or None)
            return {entry["path"]: _as_stored(entry) for page in pages for entry in page}

        return self._ask(prefix, "listed", find)

    def look_up(self, name: str) -> StoredObject:
        try:
            return self._ask(name, "read", lambda: _as_stored(self._client.head(self._store, name)))
        except BadInput as error:
            if not self.url.startswith("http") or isinstance(error.__cause__, FileNotFoundError):
                raise
            first: GetOptions = {"range": (0, 1)}  # a signed URL allows nothing but reading
            return self._ask(name, "read", lambda: _as_stored(self._client.get(self._store, name, options=first).meta))

    def read(self, name: str) -> Version | None:
        """Return a small object; None where there is none."""
        try:
            got = self._ask(name, "read", lambda: self._client.get(self._store, name))
            if got.meta["size"] > SMALL_BYTES:
                raise BadInput(f"{self._where(name)}: got {got.meta['size']:,} bytes, wanted at most {SMALL_BYTES:,}")
            content = self._ask(name, "read", lambda: bytes(got.bytes()))
        except BadInput as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        return Version(content, _tag(got.meta))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, all of it or nothing, in the place of any other."""
        self._ask(name, "written", lambda: self._client.put(self._store, name, content, use_multipart=False))

    def replace(self, name: str, content: bytes, before: Version | None) -> Version:
        """Write a small object in the place of a version, or of none; return the new one. Raises Taken for another."""
        from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError

        mode: Literal["create"] | UpdateVersion = "create" if before is None else before.tag
        try:
            result = self._ask(name, "written", lambda: self._client.put(self._store, name, content, mode=mode))
        except BadInput as error:
            if not isinstance(error.__cause__, (AlreadyExistsError, PreconditionError, NotFoundError)):
                raise
            there = self.read(name)
            if there is None or there.content != content:  # else it is ours: an answer was lost, and it was tried again
                raise Taken(f"{self.url}/{name}: another process has written it") from error
            return there
        return Version(content, _tag(result))

    def upload(self, name: str, file: BinaryIO) -> str | None:
        """Write an object of any size from a file, in parts; it appears when all have arrived. Return its tag."""
        put = functools.partial(self._client.put, chunk_size=PIECE_BYTES, max_concurrency=PIECES_AT_ONCE)
        return self._ask(name, "written", lambda: put(self._store, name, file))["e_tag"]

    def upload_verified(self, path: Path, sha256: str) -> None:
        """Write a file under its own name, and verify its sha256, by the server's checksum or by reading it."""
        name, tag = path.name, _checksum_tag(path)
        for _ in range(UPLOADS):
            with path.open("rb") as file:
                arrived = str(self.upload(name, file)).strip('"')
            if arrived == tag or self.sha256(name) == sha256:
                return
        raise BadInput(f"{self.url}/{name}: arrived damaged {UPLOADS} times; check the network, then rerun the command")

    def sha256(self, name: str) -> str:
        """Return the sha256 of an object, read to its end."""
        digest = hashlib.sha256()
        for _, piece in self.pieces(name, self.look_up(name).size_bytes):
            digest.update(piece)
        return digest.hexdigest()

    def copy(self, name: str, final: str) -> None:
        """Copy an object to another name, on the server."""
        self._ask(final, "written", lambda: self._client.copy(self._store, name, final))

    def read_range(self, name: str, begin: int, end: int, e_tag: str | None = None) -> memoryview:
        """Return bytes begin .. end of an object. Raises Taken where its tag is another."""
        from obstore.exceptions import PreconditionError

        options: GetOptions = {"range": (begin, end)}
        if e_tag is not None and not e_tag.startswith("W/"):  # a weak one never matches
            options["if_match"] = e_tag
        for left in reversed(range(ATTEMPTS)):
            try:
                got = self._ask(name, "read", lambda: self._client.get(self._store, name, options=options).bytes())
                if len(got) != end - begin:
                    raise BadInput(f"{self._where(name)}: got {len(got)} bytes at {begin}, wanted {end - begin}")
                return memoryview(got)
            except BadInput as error:
                if isinstance(error.__cause__, PreconditionError):
                    raise Taken(f"{self._where(name)}: was replaced meanwhile; rerun the same command") from error
                if not left or not _was_cut_off(error.__cause__):
                    raise
        raise AssertionError("the last attempt raises")

    def pieces(self, name: str, size_bytes: int, e_tag: str | None = None) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset in bytes, content) of an object's pieces, in order. Raises Taken where its tag is another."""

        def fetch(offset: int) -> tuple[int, memoryview]:
            return offset, self.read_range(name, offset, min(offset + PIECE_BYTES, size_bytes), e_tag)

        offsets = range(0, size_bytes, PIECE_BYTES)
        with ThreadPoolExecutor(PIECES_AT_ONCE) as threads:
            for first in offsets[::PIECES_AT_ONCE]:
                yield from threads.map(fetch, range(first, size_bytes, PIECE_BYTES)[:PIECES_AT_ONCE])

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; those that are gone already count as deleted."""
        if names:
            self._ask(min(names), "deleted", lambda: self._client.delete(self._store, list(names)))

    def _ask(self, name: str, done: str, request: Callable[[], Answer]) -> Answer:
        """Return the answer to a request. `done`: to the object, for the error."""
        from obstore.exceptions import BaseError

        try:
            return request()
        except (BaseError, ValueError, OSError) as error:
            raise BadInput(f"{self._where(name)}: cannot be {done}: {_reason(error)}") from error

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def store_of(url: str, headers: Mapping[str, str]) -> Any:
    """Return obstore's client of a URL: plain HTTP for the web, and the provider's own protocol for a bucket.

    `headers` are sent with each request to a web server; a redirect to another host removes those with a token.
    Credentials of the environment and of profiles are used for s3://, gs:// and az:// only. If this machine has none at
    all, requests are not signed, so that public buckets can be read. Raises BadInput for a scheme that is not known.
    """
    from obstore.store import HTTPStore, from_url

    scheme = url.partition("://")[0]
    client: Any = {
        "timeout": timedelta(seconds=REQUEST_SECONDS),
        "connect_timeout": timedelta(seconds=10),
        "allow_http": scheme == "http",
    }
    retries: Any = {"retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    if scheme in WEB_SCHEMES:
        client |= {"default_headers": dict(headers)}
        return HTTPStore.from_url(url, client_options=client, retry_config=retries)
    if scheme not in BUCKET_SCHEMES:
        raise BadInput(f"{url}: unknown kind of URL; wanted s3://, gs://, az://, https:// or hf://")
    options: Any = _aws_profile() if scheme == "s3" else {}
    endpoint = options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
    client["allow_http"] = endpoint.startswith("http://")
    if not _has_credentials(scheme, options):
        options["skip_signature"] = True
    return from_url(url, **options, client_options=client, retry_config=retries)


def _has_credentials(scheme: str, profile: Mapping[str, str]) -> bool:
    """Tell whether requests to a bucket may be signed; True also if the machine's own account may have access."""
    named = any(value and CREDENTIALS[scheme].fullmatch(name) for name, value in os.environ.items())
    has_file = scheme == "gs" and GOOGLE_FILE.expanduser().exists()
    return named or has_file or "access_key_id" in profile or _has_metadata_service()


@functools.cache
def _has_metadata_service() -> bool:
    """Tell whether this machine has a cloud's metadata service, which gives credentials to its virtual machines."""
    try:
        socket.create_connection(METADATA_SERVICE, timeout=METADATA_SECONDS).close()
    except OSError:
        return False
    return True


def _as_stored(entry: Mapping[str, Any]) -> StoredObject:
    return StoredObject(entry["size"], entry["last_modified"].timestamp(), entry["e_tag"], entry["version"])


def _tag(found: Mapping[str, Any]) -> "UpdateVersion":
    """Return the tags by which a store tells versions apart; obstore refuses None."""
    return {key: found[key] for key in ("e_tag", "version") if found[key] is not None}  # type: ignore[return-value]


def _checksum_tag(path: Path) -> str:
    """Return S3's ETag of a file: its md5, or for one that is sent in parts, that of their md5s."""
    digests = []
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            digests.append(hashlib.md5(data))
    if len(digests) == 1:
        return digests[0].hexdigest()
    return f"{hashlib.md5(b''.join(each.digest() for each in digests)).hexdigest()}-{len(digests)}"


def _was_cut_off(error: BaseException | None) -> bool:
    """Tell whether an answer broke off in its middle. Only the words of obstore's error tell that, no field does."""
    from obstore.exceptions import GenericError

    return isinstance(error, GenericError) and "body error" in str(error)


def _reason(error: Exception) -> str:
    """Return the reason of a failed request, for people: the server's own words where it has answered.

    obstore's errors have their kind, the status and the answer of the server in their text alone.
    """
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    answer = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)(</Message>|$)", text)
    if answer:
        said = " ".join(f"{answer[1]}: {answer[2]}".split())
        return said[:SAID_CHARACTERS]
    if isinstance(error, FileNotFoundError):
        return "not found; the same command goes on when it is there"
    if "Range request not supported" in text:
        return "the server sends whole files only, no ranges; download the file, and pass its path"
    status = re.search(r"status code: (\d{3})\b", text)
    if status:
        problem = f"the server answered with status {status[1]}"
    elif re.search("timed out|timeout", text):
        problem = f"no whole answer within {REQUEST_SECONDS:g} seconds"
    else:
        problem = "the request failed"
    return f"{problem}; check network and credentials{in_brackets(text)}"


def _aws_profile() -> dict[str, str]:
    """Return the options of the AWS profile, AWS_PROFILE or "default", that the environment does not set."""
    name = os.environ.get("AWS_PROFILE", "default")
    found: dict[str, str] = {}
    for variable, usual in PROFILE_FILES.items():
        path, parser = Path(os.environ.get(variable, usual)).expanduser(), configparser.RawConfigParser()
        try:
            parser.read(path)
        except (OSError, ValueError, configparser.Error):  # whose text may quote a key
            raise BadInput(f"{path}: cannot be read, wanted the profiles of AWS; fix this, or move it away") from None
        for section in {name, name if name == "default" else f"profile {name}"} & {*parser.sections()}:
            found |= parser[section]
    if "AWS_PROFILE" in os.environ and not found:
        raise BadInput(f"AWS_PROFILE: got {name}, no profile in {' or '.join(PROFILE_FILES.values())}")
    options = {
        option: found[key]
        for option, (key, variables) in PROFILE_KEYS.items()
        if key in found and not any(variable in os.environ for variable in variables)
    }
    others = sorted(found.keys() & {"credential_process", "role_arn", "sso_session", "sso_start_url"})
    if others and "access_key_id" not in options and "AWS_ACCESS_KEY_ID" not in os.environ:
        advice = f'run eval "$(aws configure export-credentials --profile {name} --format env)"'
        raise BadInput(f"AWS profile {name}: got {others[0]}, wanted access keys; {advice}")
    return options
