"""HTTP to a judge: one deadline and one size limit for a whole request, no redirects, no secrets in what comes back."""

import asyncio
import base64
import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

import httpx2
from openai import AsyncOpenAI

from common.errors import BadInput

CONNECT_SECONDS = 10.0
REPLY_BYTES = 1 << 22
FILE_BYTES, FILE_SECONDS = 1 << 30, 3600.0  # of a batch's files: up to 200 MB go up, more come back
SHORTEST_SECRET = 8  # characters; placeholders such as EMPTY are shorter, and are words that a verdict may hold
HIDDEN = b"[secret]"
UNSENT = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.LocalProtocolError,
    httpx2.PoolTimeout,
    httpx2.ProxyError,
    httpx2.UnsupportedProtocol,
)
OPENAI_URL = "https://api.openai.com/v1"


def split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """Return a URL without its user and password, and these: the URL is printed and stored, they are not.

    Raises BadInput, without quoting it, where it is not clear which part of it is the password.
    """
    try:
        parts = urlsplit(url)
        clear = parts.port is None or parts.port > 0
    except ValueError:
        clear = False
    if not clear or "@" in parts.path + parts.query + parts.fragment:
        raise BadInput(
            "--base-url: no URL, or one whose user or password holds a character that ends it; it is not shown here: "
            "percent-encode such characters, / as %2F, @ as %40, # as %23, ? as %3F, : as %3A"
        )
    if "@" not in parts.netloc:
        return url, None
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return plain, (unquote(parts.username or ""), unquote(parts.password or ""))


def find_key(base_url: str, credentials: tuple[str, str] | None = None) -> str | None:
    """Return the key of the provider, from the environment.

    Raises BadInput where OpenAI would be asked without one, it cannot be sent as a header, or a key or password would
    cross a network unencrypted.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip() or None
    if key is not None and not all("!" <= character <= "~" for character in key):
        raise BadInput(
            "OPENAI_API_KEY: holds a space, a line end or a character that is not ASCII, which no key has; it is not "
            "shown here: set it to the key alone"
        )
    if key is None and base_url == OPENAI_URL:
        raise BadInput("OPENAI_API_KEY: not set; set it to a key of the provider, or pass --base-url of another server")
    url = urlsplit(base_url)
    if url.scheme == "http" and not _is_loopback(url.hostname or ""):
        advice = "use https://, or an SSH tunnel to localhost"
        if credentials is not None:
            raise BadInput(f"{base_url}: the password would cross the network unencrypted; {advice}")
        if len(key or "") >= SHORTEST_SECRET:
            raise BadInput(
                f"{base_url}: OPENAI_API_KEY would cross the network unencrypted; {advice}, "
                "or unset it if this server needs no key"
            )
    return key


def open_client(
    base_url: str, credentials: tuple[str, str] | None, timeout_seconds: float, concurrency: int = 1
) -> AsyncOpenAI:
    """Return a client that repeats nothing by itself: a request that is repeated may be billed again.

    It has connections for `concurrency` requests: none waits for one while its time runs.

    Raises BadInput where `find_key` does, or no server listens.
    """
    key = find_key(base_url, credentials)
    _check_listening(base_url)
    basic = "" if credentials is None else base64.b64encode(":".join(credentials).encode()).decode()
    # Connecting times out first: what has not been sent is not billed.
    timeout = httpx2.Timeout(timeout_seconds, connect=min(CONNECT_SECONDS, timeout_seconds / 2))
    user, password = credentials or ("", "")
    token = user if len(password) < SHORTEST_SECRET else ""  # https://TOKEN@host, https://TOKEN:x@host
    secrets = [key or "", basic, password, token]
    limits = httpx2.Limits(max_connections=concurrency + 4, max_keepalive_connections=concurrency + 4)
    http = BoundedClient(base_url, timeout_seconds, secrets, auth=credentials, timeout=timeout, limits=limits)
    return AsyncOpenAI(api_key=key or "none", base_url=base_url, timeout=timeout, max_retries=0, http_client=http)


class BoundedClient(httpx2.AsyncClient):
    """A client whose requests end: after so many seconds in all, and so many bytes. Secrets in replies are hidden."""

    def __init__(self, base_url: str, seconds: float, secrets: Iterable[str], **options: Any):
        super().__init__(follow_redirects=False, **options)
        self._path = urlsplit(base_url).path.rstrip("/")
        self._seconds = seconds
        self._secrets = _pattern([secret for secret in secrets if len(secret) >= SHORTEST_SECRET])

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request and return its response, read to the end. Raises httpx2.TransportError."""
        of_file = request.url.path.removeprefix(self._path).startswith("/files")
        seconds = max(self._seconds, FILE_SECONDS) if of_file else self._seconds
        most = FILE_BYTES if of_file else REPLY_BYTES
        try:
            return await asyncio.wait_for(self._whole(request, most, {**options, "stream": True}), seconds)
        except asyncio.TimeoutError as error:
            raise httpx2.ReadTimeout(f"no complete reply within {seconds:g} s (--timeout)", request=request) from error
        except httpx2.HTTPError as error:
            error.args = tuple(self._clean(str(part).encode()).decode() for part in error.args)
            raise

    async def _whole(self, request: httpx2.Request, most: int, options: dict[str, Any]) -> httpx2.Response:
        response = await super().send(request, **options)
        content = bytearray()
        try:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > most:
                    raise httpx2.ReadError(f"a reply of more than {most:,} bytes", request=request)
        finally:
            await response.aclose()
        described = ("content-encoding", "content-length", "transfer-encoding")  # by these: not what is passed on
        headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in described]
        clean = self._clean(bytes(content))
        return httpx2.Response(response.status_code, headers=headers, content=clean, request=request)

    def _clean(self, text: bytes) -> bytes:
        return text if self._secrets is None else self._secrets.sub(HIDDEN, text)


def _pattern(secrets: list[str]) -> re.Pattern[bytes] | None:
    """Return what finds secrets in JSON or text: each character by itself, after a backslash, or as its \\u escape."""
    if not secrets:
        return None
    one = (
        "".join(rf"(?:\\?{re.escape(character)}|\\u{ord(character):04x})" for character in secret) for secret in secrets
    )
    return re.compile("|".join(one).encode(), re.IGNORECASE)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _check_listening(base_url: str) -> None:
    """Raise BadInput where no server of one's own listens: it is told before anything else is done."""
    url = urlsplit(base_url)
    if url.scheme == "http" and not getproxies():
        try:
            socket.create_connection((url.hostname or "", url.port or 80), CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise BadInput(f"{base_url}: no server: {error}; start it, or pass another --base-url") from error
