"""Access to objects under a prefix in S3, Google Cloud Storage or Azure, and to files on the web, through obstore.

Only `store_of` decides which protocol and which credentials are used for a URL. It looks at the scheme, never at the
host: an http or https URL is fetched by plain HTTP without any credentials, even if its host belongs to Amazon, Google
or Microsoft.
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

RETRY_SECONDS = 60.0  # a failed request is retried for up to this long
REQUEST_SECONDS = 60.0  # time limit for one request, which transfers at most one piece
PIECE_BYTES = 1 << 24  # size of each part of an upload, and of each range of a download
SMALL_BYTES = 1 << 26  # the largest object that is read in one request
PIECES_AT_ONCE = 8  # number of pieces that are transferred, and kept in memory, at the same time
MESSAGE_CHARACTERS = 300  # maximum length of a server's message in an error
ATTEMPTS = 4  # attempts to read a range if the connection breaks before the answer is complete
UPLOADS = 3  # attempts to upload a file that arrives damaged
# The two files that can contain AWS profiles: environment variable with the file's path -> default path. The second
# file takes precedence over the first.
PROFILE_FILES = {
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
}
# Option of obstore -> the key of an AWS profile, and the environment variables that take precedence over this key.
PROFILE_KEYS = {
    "access_key_id": ("aws_access_key_id", ["AWS_ACCESS_KEY_ID"]),
    "secret_access_key": ("aws_secret_access_key", ["AWS_ACCESS_KEY_ID"]),
    "session_token": ("aws_session_token", ["AWS_ACCESS_KEY_ID"]),
    "region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"]),
    "endpoint": ("endpoint_url", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"]),
}
# The metadata service has the same address at Amazon, Google and Microsoft.
METADATA_SERVICE, METADATA_SECONDS = ("169.254.169.254", 80), 1.0
CREDENTIALS = {  # scheme of a bucket -> environment variables that can contain its credentials
    "s3": re.compile("AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|TOKEN|WEB_IDENTITY.*|CONTAINER.*)"),
    "gs": re.compile("GOOGLE_(SERVICE_ACCOUNT.*|APPLICATION_CREDENTIALS|BEARER_TOKEN)"),
    "az": re.compile("(AZURE|MSI|IDENTITY)_.*(KEY|SECRET|TOKEN|CLI|ENDPOINT|CLIENT_ID|EMULATOR).*"),
}
GOOGLE_FILE = Path("~/.config/gcloud/application_default_credentials.json")

Answer = TypeVar("Answer")


@attrs.frozen
class Version:
    """The content of a small object, and the tag that a conditional write needs."""

    content: bytes
    tag: "UpdateVersion"


@attrs.frozen
class StoredObject:
    """An object's size, time and tags, as the server lists them."""

    size_bytes: int
    written_at: float  # by the server's clock, in seconds since 1970
    e_tag: str | None  # None if the server has no tags
    version: str | None  # None if the object comes from a list, or if the server has no versions


class VersionConflict(BadInput):
    """The object no longer has the version that a conditional read or write requires."""


class Bucket:
    """Access to the objects under SCHEME://BUCKET/PREFIX. The methods raise BadInput if a request fails.

    A file on the web is treated as a bucket with a single object, whose name is "".
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None):
        """`headers` are sent with each request to a web server."""
        try:
            import obstore
        except ImportError as error:
            raise BadInput(f"{url}: needs obstore: pip install obstore") from error
        self._client = obstore
        self.url = url.rstrip("/") if is_bucket(url.rstrip("/")) else url
        self._store = self._ask("", "opened", lambda: store_of(self.url, headers or {}))

    def objects(self, prefix: str = "") -> dict[str, StoredObject]:
        """Map the names of all objects below a prefix to the objects. The prefix consists of complete folder names."""

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
            # A signed URL may allow only reads, so the file's properties are taken from a read of its first byte.
            first: GetOptions = {"range": (0, 1)}
            return self._ask(name, "read", lambda: _as_stored(self._client.get(self._store, name, options=first).meta))

    def read(self, name: str) -> Version | None:
        """Return a small object, or None if it does not exist."""
        try:
            answer = self._ask(name, "read", lambda: self._client.get(self._store, name))
            if (size := answer.meta["size"]) > SMALL_BYTES:
                raise BadInput(f"{self._where(name)}: got {size:,} bytes, wanted at most {SMALL_BYTES:,}")
            content = self._ask(name, "read", lambda: bytes(answer.bytes()))
        except BadInput as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        return Version(content, _tag(answer.meta))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object in a single request. An existing object of that name is replaced."""
        self._ask(name, "written", lambda: self._client.put(self._store, name, content, use_multipart=False))

    def replace(self, name: str, content: bytes, before: Version | None) -> Version:
        """Write a small object only if its current version is `before`, and return the new version.

        If `before` is None, the object must not exist yet. Raises VersionConflict if the current version is not
        `before`.
        """
        from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError

        mode: Literal["create"] | UpdateVersion = "create" if before is None else before.tag
        try:
            answer = self._ask(name, "written", lambda: self._client.put(self._store, name, content, mode=mode))
        except BadInput as error:
            if not isinstance(error.__cause__, (AlreadyExistsError, PreconditionError, NotFoundError)):
                raise
            present = self.read(name)
            # If the content is the same, this process wrote it: the answer was lost, and the request was retried.
            if present is None or present.content != content:
                raise VersionConflict(f"{self.url}/{name}: another process has written it") from error
            return present
        return Version(content, _tag(answer))

    def upload(self, name: str, file: BinaryIO) -> str | None:
        """Write an object of any size from a file, in parts, and return its tag.

        The object appears only after all parts have arrived.
        """
        put = functools.partial(self._client.put, chunk_size=PIECE_BYTES, max_concurrency=PIECES_AT_ONCE)
        return self._ask(name, "written", lambda: put(self._store, name, file))["e_tag"]

    def upload_verified(self, path: Path, sha256: str) -> None:
        """Upload a file under its own name, and verify that it arrived undamaged.

        If the server's tag is not the checksum of the file, the object is read back and compared by its sha256.
        """
        name, tag = path.name, _checksum_tag(path)
        for _ in range(UPLOADS):
            with path.open("rb") as file:
                arrived = str(self.upload(name, file)).strip('"')
            if arrived == tag or self.sha256(name) == sha256:
                return
        raise BadInput(f"{self.url}/{name}: arrived damaged {UPLOADS} times; check the network, then rerun the command")

    def sha256(self, name: str) -> str:
        """Read an object to its end and return its sha256."""
        digest = hashlib.sha256()
        for _, piece in self.pieces(name, self.look_up(name).size_bytes):
            digest.update(piece)
        return digest.hexdigest()

    def copy(self, name: str, final: str) -> None:
        """Copy an object to another name, on the server."""
        self._ask(final, "written", lambda: self._client.copy(self._store, name, final))

    def read_range(self, name: str, begin: int, end: int, e_tag: str | None = None) -> memoryview:
        """Return bytes `begin` to `end` (exclusive) of an object. Raises VersionConflict if its tag is not `e_tag`."""
        from obstore.exceptions import PreconditionError

        options: GetOptions = {"range": (begin, end)}
        if e_tag is not None and not e_tag.startswith("W/"):  # a weak tag never matches
            options["if_match"] = e_tag
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                content = self._ask(name, "read", lambda: self._client.get(self._store, name, options=options).bytes())
                if len(content) != end - begin:
                    raise BadInput(f"{self._where(name)}: got {len(content)} bytes at {begin}, wanted {end - begin}")
                return memoryview(content)
            except BadInput as error:
                if isinstance(error.__cause__, PreconditionError):
                    problem = "was replaced while it was being read; rerun the same command"
                    raise VersionConflict(f"{self._where(name)}: {problem}") from error
                if not attempts_left or not _was_cut_off(error.__cause__):
                    raise
        raise AssertionError("the last attempt raises")

    def pieces(self, name: str, size_bytes: int, e_tag: str | None = None) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset in bytes, content) for the pieces of an object, in order.

        Raises VersionConflict if the object's tag is not `e_tag`.
        """

        def fetch(offset: int) -> tuple[int, memoryview]:
            return offset, self.read_range(name, offset, min(offset + PIECE_BYTES, size_bytes), e_tag)

        offsets = range(0, size_bytes, PIECE_BYTES)
        with ThreadPoolExecutor(PIECES_AT_ONCE) as threads:
            for first in offsets[::PIECES_AT_ONCE]:
                yield from threads.map(fetch, range(first, size_bytes, PIECE_BYTES)[:PIECES_AT_ONCE])

    def delete(self, names: Collection[str]) -> None:
        """Delete objects. Objects that do not exist count as deleted."""
        if names:
            self._ask(min(names), "deleted", lambda: self._client.delete(self._store, list(names)))

    def _ask(self, name: str, action: str, request: Callable[[], Answer]) -> Answer:
        """Return the answer to a request. `action`, such as "read", is used in the error "cannot be read"."""
        from obstore.exceptions import BaseError

        try:
            return request()
        except (BaseError, ValueError, OSError) as error:
            raise BadInput(f"{self._where(name)}: cannot be {action}: {_reason(error)}") from error

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def store_of(url: str, headers: Mapping[str, str]) -> Any:
    """Return obstore's client for a URL: plain HTTP for the web, and the provider's own protocol for a bucket.

    `headers` are sent with each request to a web server. If the server redirects to another host, headers that contain
    a token are not sent to that host. Credentials from the environment and from profiles are used only for s3://, gs://
    and az://. If this machine has no credentials at all, requests are not signed, so that public buckets can be read.
    Raises BadInput for an unknown scheme.
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
    """Return whether this machine has credentials to sign requests to a bucket.

    A virtual machine in a cloud counts as having credentials, because the machine's own account may have access.
    """
    has_variable = any(value and CREDENTIALS[scheme].fullmatch(name) for name, value in os.environ.items())
    has_file = scheme == "gs" and GOOGLE_FILE.expanduser().exists()
    return has_variable or has_file or "access_key_id" in profile or _has_metadata_service()


@functools.cache
def _has_metadata_service() -> bool:
    """Return whether this machine can reach a cloud's metadata service, which gives credentials to virtual machines."""
    try:
        socket.create_connection(METADATA_SERVICE, timeout=METADATA_SECONDS).close()
    except OSError:
        return False
    return True


def _as_stored(entry: Mapping[str, Any]) -> StoredObject:
    return StoredObject(entry["size"], entry["last_modified"].timestamp(), entry["e_tag"], entry["version"])


def _tag(entry: Mapping[str, Any]) -> "UpdateVersion":
    """Return the tags that identify an object's version, without tags that are None, because obstore refuses them."""
    return {key: entry[key] for key in ("e_tag", "version") if entry[key] is not None}  # type: ignore[return-value]


def _checksum_tag(path: Path) -> str:
    """Return the ETag that S3 gives a file: its md5 or, if it is uploaded in parts, the md5 of the parts' md5s."""
    digests = []
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            digests.append(hashlib.md5(data))
    if len(digests) == 1:
        return digests[0].hexdigest()
    return f"{hashlib.md5(b''.join(digest.digest() for digest in digests)).hexdigest()}-{len(digests)}"


def _was_cut_off(error: BaseException | None) -> bool:
    """Return whether an answer was cut off. Errors of obstore show this only in their text, not in a field."""
    from obstore.exceptions import GenericError

    return isinstance(error, GenericError) and "body error" in str(error)


def _reason(error: Exception) -> str:
    """Return why a request failed, as a message for people. If the server answered, this is the server's message.

    The kind of an error, its status and the server's answer are only in the text of obstore's errors, not in fields.
    """
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    answer = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)(</Message>|$)", text)
    if answer:
        server_message = " ".join(f"{answer[1]}: {answer[2]}".split())
        return server_message[:MESSAGE_CHARACTERS]
    if isinstance(error, FileNotFoundError):
        return "not found; restore it, then rerun the same command to continue"
    if "Range request not supported" in text:
        return "the server sends only whole files, not ranges; download the file and pass its path"
    status = re.search(r"status code: (\d{3})\b", text)
    if status:
        problem = f"the server answered with status {status[1]}"
    elif re.search("timed out|timeout", text):
        problem = f"no complete answer within {REQUEST_SECONDS:g} seconds"
    else:
        problem = "the request failed"
    return f"{problem}; check the network and the credentials{in_brackets(text)}"


def _aws_profile() -> dict[str, str]:
    """Return obstore's options from the AWS profile, without those that environment variables already set.

    AWS_PROFILE names the profile. If it is not set, the profile is "default".
    """
    name = os.environ.get("AWS_PROFILE", "default")
    profile: dict[str, str] = {}
    for variable, default_path in PROFILE_FILES.items():
        path, parser = Path(os.environ.get(variable, default_path)).expanduser(), configparser.RawConfigParser()
        try:
            parser.read(path)
        except (OSError, ValueError, configparser.Error):  # the error is not shown, because its text may quote a key
            raise BadInput(f"{path}: cannot be read as a file of AWS profiles; fix it or move it away") from None
        for section in {name, name if name == "default" else f"profile {name}"} & {*parser.sections()}:
            profile |= parser[section]
    if "AWS_PROFILE" in os.environ and not profile:
        raise BadInput(f"AWS_PROFILE: got {name}, but {' and '.join(PROFILE_FILES.values())} have no such profile")
    options = {
        option: profile[key]
        for option, (key, variables) in PROFILE_KEYS.items()
        if key in profile and not any(variable in os.environ for variable in variables)
    }
    unsupported_keys = sorted(profile.keys() & {"credential_process", "role_arn", "sso_session", "sso_start_url"})
    if unsupported_keys and "access_key_id" not in options and "AWS_ACCESS_KEY_ID" not in os.environ:
        advice = f'run eval "$(aws configure export-credentials --profile {name} --format env)"'
        raise BadInput(f"AWS profile {name}: got {unsupported_keys[0]}, wanted access keys; {advice}")
    return options
