"""HTTP client of a judge: deadline and size limit of whole requests, no redirects, secrets removed from replies."""

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
SHORTEST_SECRET = 8  # characters; shorter placeholders, such as EMPTY, may be words of a verdict
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
Credentials = tuple[str, str] | None  # user and password


def split_credentials(url: str) -> tuple[str, Credentials]:
    """Return a URL without its user and password, and these: the URL is printed and stored, they are not.

    Raises BadInput, which does not quote it, if it is unclear which part is the password.
    """
    try:
        parts = urlsplit(url)
        clear = parts.port is None or parts.port > 0
    except ValueError:
        clear = False
    if not clear or "@" in parts.path + parts.query + parts.fragment:
        raise BadInput(
            "--base-url: not a URL, or its user or password holds a reserved character; it is not shown here: "
            "percent-encode such characters, / as %2F, @ as %40, # as %23, ? as %3F, : as %3A"
        )
    if "@" not in parts.netloc:
        return url, None
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return plain, (unquote(parts.username or ""), unquote(parts.password or ""))


def find_key(base_url: str, credentials: Credentials = None) -> str | None:
    """Return the provider's API key from the environment.

    Raises BadInput if OpenAI would be asked without one, it is no header value, or a key or password would cross a
    network unencrypted.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip() or None
    if key is not None and not all("!" <= character <= "~" for character in key):
        raise BadInput(
            "OPENAI_API_KEY: holds a space, a line end or a non-ASCII character, which no key has; it is not shown "
            "here: set it to the key alone"
        )
    if key is None and base_url == OPENAI_URL:
        raise BadInput("OPENAI_API_KEY: not set; set it to a key of the provider, or pass --base-url of another server")
    url = urlsplit(base_url)
    if url.scheme == "http" and not _is_loopback(url.hostname or ""):
        advice = "would cross the network unencrypted; use https://, or an SSH tunnel to localhost"
        if credentials is not None:
            raise BadInput(f"{base_url}: the password {advice}")
        if len(key or "") >= SHORTEST_SECRET:
            raise BadInput(f"{base_url}: OPENAI_API_KEY {advice}, or unset it if this server needs no key")
    return key


def open_client(base_url: str, credentials: Credentials, timeout_seconds: float, concurrency: int = 1) -> AsyncOpenAI:
    """Return a client without retries, as a repeated request may be billed again.

    It has a connection for each of `concurrency` requests: none waits for one while its deadline runs.
    Raises BadInput as `find_key`, or if no server listens.
    """
    key = find_key(base_url, credentials)
    _check_listening(base_url)
    user, password = credentials or ("", "")
    basic = base64.b64encode(f"{user}:{password}".encode()).decode() if credentials else ""
    token = user if len(password) < SHORTEST_SECRET else ""  # https://TOKEN@host, https://TOKEN:x@host
    # Connecting times out first: what has not been sent is not billed.
    timeout = httpx2.Timeout(timeout_seconds, connect=min(CONNECT_SECONDS, timeout_seconds / 2))
    limits = httpx2.Limits(max_connections=concurrency + 4, max_keepalive_connections=concurrency + 4)
    secrets = [key or "", basic, password, token]
    http = BoundedClient(base_url, timeout_seconds, secrets, auth=credentials, timeout=timeout, limits=limits)
    return AsyncOpenAI(api_key=key or "none", base_url=base_url, timeout=timeout, max_retries=0, http_client=http)


class BoundedClient(httpx2.AsyncClient):
    """HTTP client with a deadline and a size limit for each whole request; secrets in replies are replaced."""

    def __init__(self, base_url: str, seconds: float, secrets: Iterable[str], **options: Any):
        super().__init__(follow_redirects=False, **options)
        self._files = urlsplit(base_url).path.rstrip("/") + "/files"
        self._seconds = seconds
        patterns = [_any_spelling(secret) for secret in secrets if len(secret) >= SHORTEST_SECRET]
        self._secrets = re.compile("|".join(patterns or ["(?!)"]).encode(), re.IGNORECASE)

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request and return its response, read to the end. Raises httpx2.TransportError."""
        of_file = request.url.path.startswith(self._files)
        seconds = max(self._seconds, FILE_SECONDS) if of_file else self._seconds
        most = FILE_BYTES if of_file else REPLY_BYTES
        try:
            return await asyncio.wait_for(self._whole(request, most, {**options, "stream": True}), seconds)
        except asyncio.TimeoutError as error:
            raise httpx2.ReadTimeout(f"no complete reply within {seconds:g} s (--timeout)", request=request) from error
        except httpx2.HTTPError as error:
            error.args = tuple(self._secrets.sub(HIDDEN, str(part).encode()).decode() for part in error.args)
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
        for name in ("content-encoding", "content-length", "transfer-encoding"):  # of the bytes as they came
            response.headers.pop(name, None)
        clean = self._secrets.sub(HIDDEN, bytes(content))
        return httpx2.Response(response.status_code, headers=response.headers, content=clean, request=request)


def _any_spelling(secret: str) -> str:
    """Return a pattern of a secret in text or JSON: each character plain, after a backslash, or as its \\u escape."""
    return "".join(rf"(?:\\?{re.escape(character)}|\\u{ord(character):04x})" for character in secret)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _check_listening(base_url: str) -> None:
    """Raise BadInput if no server listens at an http:// address."""
    url = urlsplit(base_url)
    if url.scheme == "http" and not getproxies():
        try:
            socket.create_connection((url.hostname or "", url.port or 80), CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise BadInput(f"{base_url}: no server: {error}; start it, or pass another --base-url") from error
