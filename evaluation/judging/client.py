"""HTTP client of a judge: single requests with a deadline and a size limit, no redirects, no secrets in replies."""

import asyncio
import base64
import re
import socket
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from time import time
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx2
from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI

from common.errors import BadInput
from common.json_files import parse_json
from evaluation.judging.address import SHORTEST_SECRET, Credentials, find_key
from evaluation.judging.replies import Failure, NoReply, message_in, one_line, outcome_of_error, read_reply
from evaluation.judging.store import Asked, Reply

CONNECT_SECONDS = 10.0
REPLY_BYTES = 1 << 22
FILE_BYTES, FILE_SECONDS = 1 << 30, 3600.0  # of a batch's files: up to 200 MB go up, more come back
MOST_WAIT = 120.0  # seconds that Retry-After is obeyed
HIDDEN = b"[secret]"
UNSENT = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.LocalProtocolError,
    httpx2.PoolTimeout,
    httpx2.ProxyError,
    httpx2.UnsupportedProtocol,
)
# An API's own error was not billed. A 502, a 504 or a gateway's page says nothing of the API behind it.
FAILED = (500, 503, 529)
GAVE_UP = (408, 425, 499)  # a gateway's timeout: the API behind it may go on, and bill
PATHS = {"responses": "/responses", "chat": "/chat/completions"}


def open_client(base_url: str, credentials: Credentials, timeout_seconds: float, concurrency: int = 1) -> AsyncOpenAI:
    """Return a client without retries, as a repeated request may be billed again.

    None of `concurrency` requests waits for a connection. Raises BadInput as `find_key`, or if no server listens.
    """
    key = find_key(base_url, credentials)
    _check_listening(base_url)
    user, password = credentials or ("", "")
    basic = base64.b64encode(f"{user}:{password}".encode()).decode()
    token = user if len(password) < SHORTEST_SECRET else ""  # https://TOKEN@host, https://TOKEN:x@host
    # Connecting times out first: what has not been sent is not billed.
    timeout = httpx2.Timeout(timeout_seconds, connect=min(CONNECT_SECONDS, timeout_seconds / 2))
    limits = httpx2.Limits(max_connections=concurrency + 4, max_keepalive_connections=concurrency + 4)
    secrets = [key or "", basic, password, token]
    http = BoundedClient(base_url, timeout_seconds, secrets, auth=credentials, limits=limits)
    return AsyncOpenAI(api_key=key or "none", base_url=base_url, timeout=timeout, max_retries=0, http_client=http)


async def send(client: AsyncOpenAI, api: str, body: dict[str, Any], asked: Asked, attempt: str) -> Reply | NoReply:
    """Send a request once and return its outcome. `attempt`: tells repeated requests from new ones.

    A server that knows the header Idempotency-Key answers a repeated request with the reply that it has billed already.
    """
    headers = {"Idempotency-Key": f"{asked.key}-{attempt}", "X-Client-Request-Id": asked.id}
    whole = {**body, "stream": False}  # explicit: transformers serve streams responses by default
    try:
        raw = await client.post(PATHS[api], cast_to=httpx2.Response, body=whole, options={"headers": headers})
        return read_reply(asked, parse_json(raw.text, None, unique=False))  # paid for, so duplicate keys are accepted
    except APIConnectionError as error:
        return NoReply(explained(error), Failure.LOST if may_be_done(error) else Failure.FAILED)
    except APIStatusError as error:
        failure = Failure.LOST if may_be_done(error) else Failure.FAILED
        said = NoReply(explained(error), failure, _retry_after(error.response.headers.get("retry-after", "")))
        return outcome_of_error(asked, error.status_code, error.code, said)
    except ValueError as error:
        return NoReply(f"half a reply, or none: {error}", Failure.LOST)


def may_be_done(error: APIError) -> bool:
    """Tell whether a request that ended with this error may have been done, and billed, all the same."""
    if not isinstance(error, APIStatusError):
        return not isinstance(error.__cause__, UNSENT)
    of_the_api = isinstance(error.body, dict) and error.status_code in FAILED
    return error.status_code in GAVE_UP or (error.status_code >= 500 and not of_the_api)


def explained(error: Exception) -> str:
    if isinstance(error, APIStatusError):
        if 300 <= error.status_code < 400 and "location" in error.response.headers:
            return f"{error.status_code}: redirects are not followed; pass the final address as --base-url"
        return f"{error.status_code}: {message_in(error.body) or one_line(str(error))}"
    cause = "" if error.__cause__ is None else f": {error.__cause__}"
    return one_line(f"{error}{cause}")


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
        of_transfer = ("content-encoding", "content-length", "transfer-encoding")  # of the bytes as they came
        headers = {name: value for name, value in response.headers.items() if name not in of_transfer}
        clean = self._secrets.sub(HIDDEN, bytes(content))
        return httpx2.Response(response.status_code, headers=headers, content=clean, request=request)


def _any_spelling(secret: str) -> str:
    """Return a pattern of a secret in text or JSON: each character plain, after a backslash, or as its \\u escape."""
    return "".join(rf"(?:\\?{re.escape(character)}|\\u{ord(character):04x})" for character in secret)


def _check_listening(base_url: str) -> None:
    url = urlsplit(base_url)
    if url.scheme == "http" and not getproxies():
        try:
            socket.create_connection((url.hostname or "", url.port or 80), CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise BadInput(f"{base_url}: no server: {error}; start it, or pass another --base-url") from error


def _retry_after(value: str) -> float | None:
    """Return the seconds of a Retry-After header, which holds seconds or a date; None for anything else."""
    try:
        seconds = float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - time()
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(seconds, 0.0), MOST_WAIT)
